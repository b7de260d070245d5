"""Attention in plain torch tiles beside torch's kernel, and our ring beside torch's, with one kernel on both sides.

In each round the contenders take a forward and a backward each, one after the other and in turns first, so that both
meet the same load; medians over the rounds, and the median of the rounds' ratios.  CPU time is that of the process with
its threads; on a busy machine it says more than the time on the wall: there a rank with a second thread that wakes it,
as torch's all-to-all has one, is given a larger share of the cores, even than work without any message.
The last table compares a real ring on a slow emulated link with its simulation: work sleeps, so that four ranks do not
share two cores.

    python benchmarks/cp.py [--rounds 15] [--length 1024] [--ring-length 2048]
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed.tensor.experimental._context_parallel._attention as peer
from _paired import Found, cells, paired, paired_table
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

import dualpipe_lab as lab
from dualpipe_lab.cp import (
    FlashTiles,
    MessageTimes,
    SequenceLayout,
    flash_attention,
    make_layout,
    ring_attention,
    ring_backward_ns,
    ring_forward_ns,
    shard_sequence,
    visible_pairs,
)
from dualpipe_lab.dp import storage_bytes

BATCH, HEADS, SIZE = 1, 8, 64
PAIR_NS = 120_000  # of sleep, on the emulated link
Pass = Callable[[Tensor, Tensor, Tensor, Tensor], list[Tensor]]  # q, k, v, dO to O, dQ, dK, dV


def draw(length: int, heads: int = HEADS, size: int = SIZE) -> list[Tensor]:
    """q, k, v and dO of a sequence."""
    return [torch.randn(BATCH, heads, length, size, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def through_autograd(attention: Callable[..., Tensor]) -> Pass:
    """Forward and backward of a differentiable attention."""

    def run(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        out = attention(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    return run


def naive(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The formula, with all scores at once."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.softmax(scores, -1) @ v


class TorchFlash:
    """A `Kernel` of the two operations behind `scaled_dot_product_attention` on a CPU; `offset` is None or 0.

    Its LSE of a query that sees no key is 0 in place of -inf, and no layout has such a query.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, offset: int | None, scale: float) -> tuple[Tensor, Tensor]:
        """Return the output and its LSE."""
        from torch.ops import aten  # here, because the class travels to the ranks, and `torch.ops` cannot

        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, offset == 0, scale=scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, offset: int | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k, v."""
        from torch.ops import aten

        lse = lse.contiguous()  # the operation reads a strided one as if it were dense
        operation = aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = operation(grad, q, k, v, out, lse, 0.0, offset == 0, scale=scale)
        return dq, dk, dv


def torch_ring(rank: int, world_size: int) -> Pass:
    """Torch's ring, balanced as ours is, in the precision of its inputs; a private function that may move."""
    peer._cp_options.enable_load_balance, peer._cp_options.convert_to_f32 = True, False
    peer.set_rotate_method("alltoall")
    group, kernel, scale = torch.distributed.group.WORLD, TorchFlash(), SIZE**-0.5

    def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **_: object) -> tuple[Tensor, Tensor]:
        return kernel.forward(q, k, v, 0 if is_causal else None, scale)

    def backward(
        query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool, grad_out: Tensor
    ) -> tuple[Tensor, ...]:
        return kernel.backward(grad_out, query, key, value, out, logsumexp, 0 if is_causal else None, scale)

    def run(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
        out, lse = peer._templated_ring_attention(group, 2, forward, q, k, v, is_causal=True)[:2]
        saved = q, k, v, out, lse
        grads = peer._templated_ring_attention_backward(group, 2, backward, grad, "grad_out", *saved, is_causal=True)
        return [out, *grads[:3]]

    return run


def compare_rings(rank: int, world_size: int, length: int, rounds: int) -> Found:
    """Both rings on the same parts; they must agree before they are timed."""
    layout = make_layout("zigzag", length, world_size)
    tensors = [shard_sequence(tensor, layout, rank, 2) for tensor in draw(length)]
    kernel = TorchFlash()
    contenders = {
        "ours": through_autograd(lambda q, k, v: ring_attention(q, k, v, layout, kernel=kernel)),
        "theirs": torch_ring(rank, world_size),
    }
    for mine, other in zip(*(contender(*tensors) for contender in contenders.values()), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    return paired({name: partial(run, *tensors) for name, run in contenders.items()}, rounds)


class Asleep(FlashTiles):
    """The kernel after a rest: so long per visible pair, twice as long in the backward."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, offset: int | None, scale: float) -> tuple[Tensor, Tensor]:
        """Rest, then compute."""
        lab.compute(PAIR_NS * _pairs(q, k, offset) / 1e6)
        return super().forward(q, k, v, offset, scale)

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
        """Rest twice as long, then compute."""
        lab.compute(2 * PAIR_NS * _pairs(q, k, rest[3]) / 1e6)
        return super().backward(grad, q, k, *rest)


def _pairs(q: Tensor, k: Tensor, offset: object) -> int:
    rows, columns = q.shape[2], k.shape[2]
    return rows * columns if offset is None else rows * (rows + 1) // 2


def emulate(rank: int, world_size: int, layout: SequenceLayout, rounds: int) -> list[list[int]]:
    """Nanoseconds of a forward and of a backward on a slow link, in every round."""
    kernel, found = Asleep(), []
    parts = [shard_sequence(tensor, layout, rank, 2) for tensor in draw(layout.length, 1, 16)]
    leaves = [tensor.requires_grad_() for tensor in parts[:3]]
    for _ in range(rounds):
        lab.comm.barrier()
        began = lab.now()
        out = ring_attention(*leaves, layout, kernel=kernel)
        times = [lab.now() - began]
        lab.comm.barrier()
        began = lab.now()
        torch.autograd.grad(out, leaves, parts[3])
        found.append([*times, lab.now() - began])
    return found


def simulate(layout: SequenceLayout, link: lab.Link) -> list[int]:
    """Nanoseconds until the last rank is done with the forward, and with the backward."""
    work = [[PAIR_NS * pairs for pairs in row] for row in visible_pairs(layout)]
    transfer = link.transfer_ns(2 * BATCH * 16 * 4 * layout.size(0))
    messages = MessageTimes([[transfer] * layout.num_ranks] * layout.num_ranks, link.latency_ns)
    twice = [[2 * ns for ns in row] for row in work]
    return [max(ring_forward_ns(work, messages)), max(ring_backward_ns(twice, messages, messages))]


def saved(attention: Callable[..., Tensor], length: int) -> int:
    """Bytes that a forward keeps for its backward."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda packed: packed):
        attention(*(tensor.requires_grad_() for tensor in draw(length)[:3]))
    return storage_bytes(tensor.detach() for tensor in kept)


def flash_tables(length: int, rounds: int) -> None:
    """Tiles beside `scaled_dot_product_attention`."""
    torch.set_num_threads(1)
    table = paired_table(f"FlashTiles / scaled_dot_product_attention, {HEADS} heads of {SIZE}, {length} positions", "")
    for causal in (False, True):
        corner = "top_left" if causal else None
        ours = through_autograd(lambda q, k, v, corner=corner: flash_attention(q, k, v, corner))
        theirs = through_autograd(
            lambda q, k, v, causal=causal: functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        )
        tensors = draw(length)
        both = {"ours": partial(ours, *tensors), "theirs": partial(theirs, *tensors)}
        found = paired(both, rounds, meet=lambda: None)
        table.add_row("causal" if causal else "all", *cells(found))
    Console(width=180).print(table)
    table = Table(title="MiB kept for the backward (causal)")
    for column in ("positions", "FlashTiles", "scaled_dot_product_attention", "naive"):
        table.add_column(column, justify="right")
    for size in (length // 4, length // 2, length):
        forms = (
            lambda q, k, v: flash_attention(q, k, v, "top_left"),
            lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
            lambda q, k, v: naive(q, k, v, True),
        )
        table.add_row(f"{size:,}", *(f"{saved(form, size) / 2**20:.2f}" for form in forms))
    Console(width=180).print(table)


def link_table(rounds: int, length: int = 128) -> None:
    """A real ring of sleeping ranks on a slow link beside its simulation."""
    link = lab.Link(gbps=0.001, latency_ms=0.5)
    table = Table(title="Ring on 4 ranks, a link of 1 Mbit/s and 0.5 ms: measured beside simulated, medians")
    for column in ("layout", "forward ms", "simulated", "ratio", "backward ms", "simulated", "ratio"):
        table.add_column(column, justify="right")
    for name in ("contiguous", "striped", "zigzag"):
        layout = make_layout(name, length, 4)
        ranks = lab.launch(emulate, 4, layout, rounds, link=link, timeout=600, output="collect")
        cells = []
        for each, expected in zip((0, 1), simulate(layout, link), strict=True):
            measured = statistics.median(max(times[each] for times in one) for one in zip(*ranks, strict=True))
            cells += [f"{measured / 1e6:.1f}", f"{expected / 1e6:.1f}", f"{measured / expected:.3f}"]
        table.add_row(name, *cells)
    Console(width=180).print(table)


def main() -> None:
    """Run all comparisons and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--ring-length", type=int, default=2048)
    arguments = parser.parse_args()
    flash_tables(arguments.length, arguments.rounds)
    table = paired_table(f"Ring of ours / torch's, zigzag, causal, {arguments.ring_length} positions", "GLOO ranks")
    for num_ranks in (2, 4):
        sizes = arguments.ring_length, arguments.rounds
        found = lab.launch(compare_rings, num_ranks, *sizes, timeout=600, output="collect")[0]
        table.add_row(str(num_ranks), *cells(found))
    Console(width=180).print(table)
    link_table(min(7, arguments.rounds))


if __name__ == "__main__":
    main()
