"""A training step of our Llama beside torch's tensor parallelism, and a loss in chunks beside others, on GLOO ranks.

The same model, the same data, one thread per rank: forward, loss and backward, with SGD's update of the weights.  In
each round both contenders take some steps, one after the other and in turns first, so that both meet the same load;
medians over the rounds, and the median of the rounds' ratios.  Both use torch's attention, so that what is compared
is the sharding.  CPU time is that of rank 0's process with GLOO's threads; on a busy machine it says more than the
time on the wall.
A second table has the head's loss in chunks beside the loss of all logits on 2 ranks, and beside torch's chunks on 1:
forward and backward, and the memory by which a process grows at its peak.

    python benchmarks/tp.py [--rounds 15] [--steps 4] [--hidden 256] [--layers 4] [--tokens 128] [--vocabulary 4096]
        [--head-tokens 4096] [--head-vocabulary 32768] [--chunk 256] [--only step head]
"""

import argparse
import ctypes
import gc
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from _paired import Found, cells, in_turns, paired, paired_table, spread
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

import dualpipe_lab as lab
from dualpipe_lab.models import Llama, LlamaConfig, PlainLlama, parallelize
from dualpipe_lab.tp import LMHead, full_state_dict

RANKS, BATCH = 2, 2
TITLES = {
    "plain": "Llama / Colwise, Rowwise, loss_parallel",
    "sequence": "the same with sequence_parallel / SequenceParallel",
    "sequence, kept": "the same with regather=False / SequenceParallel",
    "attention": "Llama with its own attention / as above",
}
HEADS = {  # of the second table: ranks, and the two contenders
    "in chunks / all logits": (2, ("chunked", "whole")),
    "in chunks / torch's linear_cross_entropy": (1, ("chunked", "torch")),
}
Step = Callable[[Tensor], None]


def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as torch has it."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def contenders(kind: str, config: LlamaConfig) -> dict[str, Step]:
    """A step of ours and a step of torch's, from the same weights."""
    mesh, is_sharded = lab.Mesh(lab.Topology([("tp", RANKS)])), kind.startswith("sequence")
    attend = {} if kind == "attention" else {"attend": torch_attention}
    ours = Llama(config, mesh, is_sharded, regather=kind != "sequence, kept", **attend)
    theirs = PlainLlama(config)
    theirs.load_state_dict(full_state_dict(ours, ours.tp.group))
    theirs = parallelize(theirs, mesh.device_mesh(), is_sharded)

    def step_of(model: torch.nn.Module, context: Callable) -> Step:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(ids: Tensor) -> None:
            optimizer.zero_grad()
            with context():
                model.loss(ids, ids.roll(-1, 1)).backward()
            optimizer.step()

        return step

    return {"ours": step_of(ours, nullcontext), "theirs": step_of(theirs, loss_parallel)}


def compare(rank: int, world_size: int, kind: str, rounds: int, steps: int, tokens: int, config: LlamaConfig) -> Found:
    """What both contenders took in every round."""
    ids = torch.randint(0, config.vocabulary_size, (BATCH, tokens), generator=torch.Generator().manual_seed(0))
    both = {name: partial(step, ids) for name, step in contenders(kind, config).items()}
    gc.freeze()
    return paired(both, rounds, steps)


def head_step(name: str, chosen: argparse.Namespace) -> Callable[[], None]:
    """Forward and backward of the head and its loss, of one contender."""
    generator = torch.Generator().manual_seed(0)
    head = LMHead(chosen.hidden, chosen.head_vocabulary)
    x = torch.randn(chosen.head_tokens, chosen.hidden, generator=generator, requires_grad=True)
    targets = torch.randint(chosen.head_vocabulary, (chosen.head_tokens,), generator=generator)

    def loss() -> Tensor:
        if name == "torch":
            options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chosen.chunk, chunking_method=None)
            return functional.linear_cross_entropy(x, head.weight, targets, options=options)
        return head.loss(x, targets, chunk=chosen.chunk if name == "chunked" else None)

    def step() -> None:
        x.grad = head.weight.grad = None
        loss().backward()

    return step


def head_times(rank: int, world_size: int, names: tuple[str, str], chosen: argparse.Namespace) -> Found:
    """What both contenders took in every round."""
    both = {title: head_step(name, chosen) for title, name in zip(("ours", "theirs"), names, strict=True)}
    gc.freeze()
    return paired(both, chosen.rounds)


def head_growth(rank: int, world_size: int, name: str, chosen: argparse.Namespace) -> int:
    """The bytes by which this rank's peak memory grows in two steps, from the first one on."""
    step = head_step(name, chosen)
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before counts for no contender
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts again from what is held now
    before = held("VmRSS")
    step()
    step()
    return held("VmHWM") - before


def held(line: str) -> int:
    """The bytes that this process holds now (VmRSS), or held at most (VmHWM)."""
    rows = (row.split() for row in Path("/proc/self/status").read_text().splitlines())
    return next(int(row[1]) * 1024 for row in rows if row[0] == f"{line}:")


def head_memory(ranks: int, names: tuple[str, str], chosen: argparse.Namespace) -> list[str]:
    """Peak memory of both in MB, and the median of three rounds' ratios with its spread."""
    found: dict[str, list[int]] = {name: [] for name in names}
    for number in range(3):
        for name in in_turns(names, number):
            found[name].append(max(lab.launch(head_growth, ranks, name, chosen, timeout=600, output="collect")))
    ratios = [one / other for one, other in zip(*found.values(), strict=True)]
    return [*(f"{statistics.median(values) / 2**20:.1f}" for values in found.values()), spread(ratios)]


def head_table(chosen: argparse.Namespace) -> Table:
    """The comparisons of the head's loss."""
    title = f"{chosen.head_tokens} tokens of {chosen.hidden}, {chosen.head_vocabulary} words, chunks of {chosen.chunk}"
    table = paired_table(f"{title}, {chosen.rounds} rounds", more=("peak MB", "theirs", "ratio (least to most)"))
    for name, (ranks, names) in HEADS.items():
        if "torch" in names and not hasattr(functional, "linear_cross_entropy"):
            continue  # before torch 2.13
        found = lab.launch(head_times, ranks, names, chosen, timeout=600, output="collect")[0]
        table.add_row(f"{name}, ranks: {ranks}", *cells(found), *head_memory(ranks, names, chosen))
    return table


def main() -> None:
    """Run all comparisons and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("rounds", 15), ("steps", 4), ("hidden", 256), ("layers", 4), ("tokens", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("vocabulary", 4096), ("head-tokens", 4096), ("head-vocabulary", 32768), ("chunk", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", nargs="+", choices=("step", "head"), default=["step", "head"])
    chosen = parser.parse_args()
    if "step" in chosen.only:
        Console(width=180).print(step_table(chosen))
    if "head" in chosen.only:
        Console(width=220).print(head_table(chosen))


def step_table(chosen: argparse.Namespace) -> Table:
    """The comparisons of a training step."""
    width = chosen.hidden
    config = LlamaConfig(chosen.vocabulary, width, 4 * width, chosen.layers, num_heads=8, num_kv_heads=4)
    title = (
        f"{RANKS} GLOO ranks, {config.num_parameters() / 1e6:.1f} million fp32 parameters, {BATCH} x {chosen.tokens}"
    )
    table = paired_table(f"{title} tokens, {chosen.rounds} rounds")
    for kind, name in TITLES.items():
        sizes = chosen.rounds, chosen.steps, chosen.tokens, config
        table.add_row(name, *cells(lab.launch(compare, RANKS, kind, *sizes, timeout=600, output="collect")[0]))
    return table


if __name__ == "__main__":
    main()
