"""Judging key heads that several ranks hold: gradients of the projections, and weights after a step of training.

A key head's gradient is the sum over its readers; what each rank's own readers contribute is drawn, not computed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.differences import difference, multiple
from dualpipe_course.exercise import Wrong
from dualpipe_course.switched_off import Without
from dualpipe_course.tp import layers
from dualpipe_course.trial import on_ranks

if TYPE_CHECKING:
    from torch import Tensor

TOKENS, HIDDEN, HEAD = 5, 3, 2
BY_HAND = "torch.autograd:grad", "torch:enable_grad", "dualpipe_lab.tp.gqa"  # switched off, with the other layers
CASES = ((1, 2, 1), (2, 4, 2), (2, 2, 1), (4, 4, 4), (4, 4, 2), (4, 4, 1))  # ranks, query heads, key heads
STEPS = ((2, 4, 2, 1), (2, 2, 1, 1), (4, 4, 2, 2), (4, 4, 1, 3))  # and microbatches
RATE = 0.5


class Compared(NamedTuple):
    """A tensor of one rank, and the same of one process; `held` names its part, equal for copies."""

    found: list[float]
    expected: list[float]
    held: tuple[int, int]
    before: Sequence[float] = ()


def check_projections(fn: Callable[..., Any], num_ranks: int, num_heads: int, num_kv_heads: int) -> None:
    """Raise `Wrong` unless the gradients are those of one process, for as many bytes as they need."""
    case = _named(num_ranks, num_heads, num_kv_heads)
    answer = Without(fn, *layers.LIBRARY, *BY_HAND)
    results = on_ranks(_project, num_ranks, answer, num_heads, num_kv_heads, case=case)
    for rank, (by_name, _) in enumerate(results):
        for name, ours in by_name.items():
            where = f"{case}: rank {rank}: {name} "
            if len(ours.found) != len(ours.expected):
                raise Wrong(f"{where}has {len(ours.found)} numbers, this rank's has {len(ours.expected)}")
            if (off := difference(ours.found, ours.expected)) is None:
                continue
            parts = [other[name] for other, _ in results]
            if _is_own_part(ours, parts):
                raise Wrong(where + "is what this rank's query heads contribute; others have read the same tensor")
            if off.ratio:
                raise Wrong(f"{where}is {off.ratio:.4g} times that of one process")
            raise Wrong(f"{case}: rank {rank}: numbers of {name} {off}")
    if any(has_changed for _, has_changed in results):
        raise Wrong(f"{case}: an argument has changed; send what you have computed")
    num_copies = max(num_ranks // num_kv_heads, 1)
    needed = 2 * (num_ranks - 1) * 8 * TOKENS * HIDDEN
    needed += num_ranks // num_copies * 2 * (num_copies - 1) * 8 * (2 * HEAD * HIDDEN)
    if (sent := sum(results.ledger.sent("all_reduce", rank) for rank in range(num_ranks))) != needed:
        raise Wrong(
            f"{case}: all-reduces sent {sent:,} bytes in all, {needed:,} are needed: one sum of dx over all ranks, "
            "and what the holders of the same key head owe each other"
        )


def check_step(fn: Callable[..., Any], num_ranks: int, num_heads: int, num_kv_heads: int, num: int) -> None:
    """Raise `Wrong` unless all weights are those of one process after a step of `num` microbatches."""
    case = f"{_named(num_ranks, num_heads, num_kv_heads)}, {num} microbatch(es)"
    results: Sequence[Mapping[str, Compared]] = on_ranks(_train, num_ranks, fn, num_heads, num_kv_heads, num, case=case)
    for rank, by_name in enumerate(results):
        for name, ours in by_name.items():
            if (off := difference(ours.found, ours.expected)) is None:
                continue
            for other, others in enumerate(results):
                between = difference(others[name].found, ours.found) if others[name].held == ours.held else None
                if between is not None:
                    raise Wrong(
                        f"{case}: ranks {rank} and {other} hold copies of the same rows of {name}, and after one step "
                        f"these are {between.error:.2g} apart, though all ranks found the same loss"
                    )
            moves = [
                [a - b for a, b in zip(values, ours.before, strict=True)] for values in (ours.found, ours.expected)
            ]
            ratio = multiple(*moves)
            if ratio is None:
                raise Wrong(f"{case}: rank {rank}: numbers of {name} {off}")
            raise Wrong(f"{case}: rank {rank}: {name} has moved {ratio:.4g} times as far as on one process")


def _named(num_ranks: int, num_heads: int, num_kv_heads: int) -> str:
    return f"{num_ranks} rank(s), {num_heads} query and {num_kv_heads} key head(s)"


def _is_own_part(ours: Compared, parts: Sequence[Compared]) -> bool:
    """Whether the sum over all who hold the same would be right."""
    rows = [other.found for other in parts if other.held == ours.held]
    if len(rows) == 1 or any(len(row) != len(ours.expected) for row in rows) or all(row == rows[0] for row in rows):
        return False
    return difference([sum(column) for column in zip(*rows, strict=True)], ours.expected) is None


def _spans(rank: int, num_ranks: int, num_heads: int, num_kv_heads: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Features of the rank's query heads, and of the key heads that they read."""
    size, group = num_heads // num_ranks, num_heads // num_kv_heads
    first, last = rank * size, (rank + 1) * size - 1
    return (first * HEAD, (last + 1) * HEAD), (first // group * HEAD, (last // group + 1) * HEAD)


def _project(
    rank: int, world_size: int, fn: Callable[..., Any], num_heads: int, num_kv_heads: int
) -> tuple[dict[str, Compared], bool]:
    import torch

    from dualpipe_lab.tp.config import TensorParallel

    group = TensorParallel().neighbours(world_size // num_kv_heads) if world_size > num_kv_heads else None
    spans = _spans(rank, world_size, num_heads, num_kv_heads)
    queries, keys = (slice(*span) for span in spans)
    x, d_queries = layers.draw("x", (TOKENS, HIDDEN)), layers.draw("dQ", (TOKENS, num_heads * HEAD))
    sizes = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads}
    q, k, v = (layers.draw(name, (size * HEAD, HIDDEN)) for name, size in sizes.items())
    (d_keys, own_keys), (d_values, own_values) = (
        _contributed(name, queries, keys, num_heads, num_kv_heads) for name in ("dK", "dV")
    )
    arguments = [d_queries[:, queries].contiguous(), own_keys, own_values, x, q[queries], k[keys], v[keys]]
    given = [argument.clone() for argument in arguments]
    found = fn(*given, group)
    if not isinstance(found, (tuple, list)) or len(found) != 4 or not all(isinstance(t, torch.Tensor) for t in found):
        raise TypeError("return four tensors: dx, dq, dk, dv")
    dx = d_queries @ q + d_keys @ k + d_values @ v
    dq, dk, dv = (grad.t() @ x for grad in (d_queries, d_keys, d_values))
    expected = {"dx": (dx, (0, 0)), "dq": (dq[queries], spans[0]), "dk": (dk[keys], spans[1])}
    expected["dv"] = dv[keys], spans[1]
    compared = {
        name: Compared(_numbers(ours), _numbers(theirs), held)
        for ours, (name, (theirs, held)) in zip(found, expected.items(), strict=True)
    }
    return compared, not all(a.equal(b) for a, b in zip(given, arguments, strict=True))


def _contributed(name: str, queries: slice, keys: slice, num_heads: int, num_kv_heads: int) -> "tuple[Tensor, Tensor]":
    """Gradients of all key heads, and what these query heads contribute to those that they read."""
    import torch

    heads = num_kv_heads, num_heads // num_kv_heads, HEAD
    part = layers.draw(name, (TOKENS, num_heads * HEAD)).unflatten(1, heads)
    is_here = torch.zeros(num_heads * HEAD, dtype=torch.float64)
    is_here[queries] = 1
    own = (part * is_here.unflatten(0, heads)).sum(2).flatten(1)
    return part.sum(2).flatten(1), own[:, keys].contiguous()


def _train(
    rank: int, world_size: int, fn: Callable[..., Any], num_heads: int, num_kv_heads: int, num: int
) -> dict[str, Compared]:
    import torch

    from dualpipe_lab.models.llama_config import LlamaConfig
    from dualpipe_lab.models.plain_llama import PlainAttention
    from dualpipe_lab.tp.config import TensorParallel
    from dualpipe_lab.tp.gqa import GroupedQueryAttention
    from dualpipe_lab.tp.shard import load_full_state_dict, shards_of

    torch.manual_seed(num)
    plain = PlainAttention(LlamaConfig(2, HIDDEN, 1, 1, num_heads, num_kv_heads, head_size=HEAD), torch.float64)
    batch = [torch.randn(2, 1, TOKENS, HIDDEN, dtype=torch.float64).unbind() for _ in range(num)]
    layer = GroupedQueryAttention(
        HIDDEN, num_heads, num_kv_heads, HEAD, TensorParallel(coalesce=True), dtype=torch.float64
    )
    load_full_state_dict(layer, plain.state_dict())
    before = {name: weight.detach().clone() for name, weight in plain.named_parameters()}
    fn(layer, torch.optim.SGD(layer.parameters(), lr=RATE), [(x.clone(), target.clone()) for x, target in batch])
    for x, target in batch:
        ((plain(x, torch.arange(TOKENS)) - target).square().mean() / num).backward()
    torch.optim.SGD(plain.parameters(), lr=RATE).step()
    expected, shards, found = dict(plain.named_parameters()), shards_of(layer), {}
    for name, weight in sorted(layer.named_parameters()):
        shard = shards[name]
        parts = (weight, shard.of(expected[name]), shard.of(before[name]))
        ours, theirs, old = (_numbers(part) for part in parts)
        found[f"W_{name[0]}"] = Compared(ours, theirs, (shard.start, shard.stop), old)
    return found


def _numbers(tensor: "Tensor") -> list[float]:
    return [float(number) for number in tensor.detach().flatten().tolist()]
