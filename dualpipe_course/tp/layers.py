"""Sharded layers, for checks: outputs and gradients of every rank beside one process, bytes by direction.

A layer of a check is a function of named tensors.  Each is the same on all ranks, or sharded along a dimension.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.comparison import (
    Found,
    Limit,
    Numbers,
    Off,
    Unchanged,
    Values,
    compare_on_ranks,
    in_words,
    on_one_process,
    other_dtype,
)
from dualpipe_course.meter import Meter

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
LIBRARY = tuple(
    f"dualpipe_lab.tp.{name}" for name in ("mappings", "linear", "swiglu", "grads:sum_partial_gradients")
)  # switched off while an answer runs


class Case(NamedTuple):
    """A layer on `num_ranks` ranks: shapes of the full tensors, and the sharded dimension of each (None: no).

    With `counts_kept` the costs of a rank name the bytes that it keeps between forward and backward, output included.
    """

    num_ranks: int
    shapes: Mapping[str, Shape]
    cuts: Mapping[str, int | None]
    out_shape: Shape
    out_cut: int | None = None
    counts_kept: bool = False

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in self.shapes.items())
        return f"{self.num_ranks} rank(s), {shapes}"


def check_layer(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    case: Case,
    *,
    forward: int = 0,
    backward: int = 0,
    because: str,
    hints: Mapping[str, str] = {},
    behind: str = "",
    limits: Sequence[Limit] = (),
) -> None:
    """Raise `Wrong` unless the outputs and all gradients are those of one process, for so many bytes.

    Args:
        fn: the answer, called with each rank's shards in the order of the case.
        reference: the same layer on one process, called with the full tensors.
        case: sizes.
        forward: bytes of the tensors that are summed forwards.
        backward: the same backwards.
        because: why so many.
        hints: what else to say where the numbers of an output or a gradient are wrong, by its name.
        behind: what to say of the gradients that follow where f stands behind the layer.
        limits: what else it may cost.
    """
    sums = []
    for way, size in (("forward", forward), ("backward", backward)):
        words = f"in the {way} the ranks sent {{found:,}} bytes in all, {{most:,}} are needed. {because}"
        needed = 2 * (case.num_ranks - 1) * size
        sums.append(Limit(f"{way} bytes", needed, words, needed))

    def why(off: Off) -> str:
        if off.found is None:
            lacks = "return a tensor" if off.name == "y" else "no gradient has arrived there"
            return f"{off.name} is missing; {lacks}"
        return in_words(off) + (hints.get(off.name, "") if off.difference else "")

    compare_on_ranks(
        _step,
        case.num_ranks,
        fn,
        case,
        reference,
        behind,
        case=str(case),
        beside=lambda: on_one_process(_expected, reference, case),
        why=why,
        limits=[*sums, *limits],
    )


def num_bytes(shape: Shape) -> int:
    """Bytes of a float64 tensor."""
    return 8 * prod(shape)


def all_reduce_bytes(groups: Sequence[Sequence[int]], numel: int) -> int:
    """Bytes that all ranks together send for a sum in each group, padded for its ring."""
    return sum(2 * (len(ranks) - 1) * -(-numel // len(ranks)) * len(ranks) for ranks in groups) * 8


def draw(name: str, shape: Shape) -> "Tensor":
    """Whole numbers by name: sums are exact in any order."""
    import torch

    seed = sum(map(ord, name)) + 31 * len(shape)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).double() / 4


def own_part(tensor: "Tensor", dim: int | None, rank: int, num_ranks: int) -> "Tensor":
    """A rank's part along a dimension, perhaps without any number; without a dimension all of it."""
    if dim is None:
        return tensor.clone()
    size = -(-tensor.shape[dim] // num_ranks)
    start = min(rank * size, tensor.shape[dim])
    return tensor.narrow(dim, start, min(size, tensor.shape[dim] - start)).clone()


def _step(
    rank: int, world_size: int, fn: Callable[..., Any], case: Case, reference: Callable[..., Any], behind: str
) -> Found:
    shards = {
        name: own_part(draw(name, shape), case.cuts[name], rank, world_size).requires_grad_()
        for name, shape in case.shapes.items()
    }
    dy = own_part(draw("dy", case.out_shape), case.out_cut, rank, world_size)
    unchanged, meter = Unchanged(**shards, dy=dy), Meter()
    y, kept = _run(fn, list(shards.values()), case.counts_kept)
    if refused := other_dtype(dy, y):
        return Found({}, refused=refused)
    forward, values = meter.lap(), {"y": Numbers.of(y)}
    if values["y"] is not None and values["y"].shape == tuple(dy.shape):
        y.backward(dy)
    backward = meter.lap()
    values |= {f"d{name}": Numbers.of(shard.grad) for name, shard in shards.items()}
    costs: dict[str, float] = {
        "forward bytes": forward.bytes,
        "backward bytes": backward.bytes,
    }
    costs["kept bytes"] = kept
    changed = "an argument or the gradient that came in has changed; send a copy of it" if unchanged.first() else ""
    slips = {name: {behind: value} for name, value in _f_behind(reference, case, rank).items()} if behind else {}
    return Found(values, slips=slips, costs=costs, changed=changed)


def _f_behind(reference: Callable[..., Any], case: Case, rank: int) -> Values:
    """A rank's gradients where an f at the output sums dy over ranks with equally many outputs."""
    size = case.num_ranks
    dys = [own_part(draw("dy", case.out_shape), case.out_cut, owner, size) for owner in range(size)]
    if len({dy.shape for dy in dys}) > 1:
        return {}
    shards = {
        n: own_part(draw(n, shape), case.cuts[n], rank, size).requires_grad_() for n, shape in case.shapes.items()
    }
    reference(*shards.values()).backward(sum(dys))
    return {f"d{name}": Numbers.of(shard.grad) for name, shard in shards.items()}


def _run(fn: Callable[..., Any], shards: "list[Tensor]", counts_kept: bool) -> tuple[Any, int]:
    """The output, and the bytes of the output and of all that its graph keeps and was not given."""
    from torch.autograd.graph import saved_tensors_hooks

    from dualpipe_lab.dp.measure import storage_bytes

    if not counts_kept:
        return fn(*shards), 0
    held: list[Tensor] = []

    def keep(tensor: "Tensor") -> "Tensor":
        held.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        y = fn(*shards)
    held += _on_contexts(y)
    given = {shard.untyped_storage().data_ptr() for shard in shards}
    return y, storage_bytes(t for t in held if t.untyped_storage().data_ptr() not in given)


def _on_contexts(y: Any) -> "list[Tensor]":
    """The output, and the tensors that are attributes of the contexts in its graph, where hooks do not see them."""
    import torch

    found, nodes = [y], [getattr(y, "grad_fn", None)]
    while nodes:
        if (node := nodes.pop()) is not None:
            found += getattr(node, "__dict__", {}).values()
            nodes += [following for following, _ in node.next_functions]
    return [value for value in found if isinstance(value, torch.Tensor)]


def _expected(rank: int, world_size: int, reference: Callable[..., Any], case: Case) -> list[Values]:
    full = {name: draw(name, shape).requires_grad_() for name, shape in case.shapes.items()}
    y = reference(*full.values())
    y.backward(draw("dy", case.out_shape))
    found = {"y": (y.detach(), case.out_cut)}
    found |= {f"d{name}": (tensor.grad, case.cuts[name]) for name, tensor in full.items()}
    return [
        {name: Numbers.of(own_part(tensor, cut, owner, case.num_ranks)) for name, (tensor, cut) in found.items()}
        for owner in range(case.num_ranks)
    ]


def backward_with_hook(
    hooks: "dict[str, Any]", forward: "Callable[[], Tensor]", weight: "Tensor", dy: "Tensor"
) -> "tuple[str, Tensor | None]":
    """Put a weight's gradient off, as an I does: the hook is there in the backward alone.

    Returns:
        What is wrong, or an empty string; the gradient from what the hook was given.
    """
    calls: list[tuple[Tensor, Tensor, Tensor]] = []
    y, before, weight.grad = forward(), hooks["weight_grad"], None
    hooks["weight_grad"] = lambda *given: calls.append(given)
    try:
        y.backward(dy)
    finally:
        hooks["weight_grad"] = before
    if len(calls) != 1 or len(calls[0]) != 3:
        return (
            f'a backward called the hook that stood in HOOKS["weight_grad"] meanwhile {len(calls)} times, expected one '
            "call with (weight, x, dy); is the hook read when the backward runs, and is the product that of linear?"
        ), None
    if calls[0][0] is not weight:
        return "the hook is to get (weight, x, dy), with the weight itself: it adds to its .grad later", None
    if weight.grad is not None:
        return "the hook returned None, to add the weight's gradient later, and the weight has got one already", None
    return "", calls[0][2].t() @ calls[0][1]
