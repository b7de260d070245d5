"""Layers cut over ranks, for checks: what every rank found, beside one process, in words; bytes by direction.

A layer of a check is a function of named tensors.  Each is the same on all ranks, or cut along a dimension.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.differences import apart, close, difference
from dualpipe_course.exercise import Wrong
from dualpipe_course.trial import on_ranks

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
LIBRARY = tuple(
    f"dualpipe_lab.tp.{name}"
    for name in ("mappings", "linear", "fused_linear", "swiglu", "grads:sum_partial_gradients")
)  # switched off while an answer runs


class Case(NamedTuple):
    """A layer on `num_ranks` ranks: shapes of the whole tensors, and along which dimension each is cut (None: not)."""

    num_ranks: int
    shapes: Mapping[str, Shape]
    cuts: Mapping[str, int | None]
    out_shape: Shape
    out_cut: int | None = None

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in self.shapes.items())
        return f"{self.num_ranks} rank(s), {shapes}"


class Found(NamedTuple):
    """What one rank has after a step: shape and numbers of its tensors by name, what it sent each way."""

    tensors: dict[str, tuple[Shape, list[float]] | None]
    forward_bytes: int
    backward_bytes: int
    backward_messages: int
    has_changed: bool


def check_layer(fn: Callable[..., Any], reference: Callable[..., Any], case: Case, one_sum: str) -> list[Found]:
    """Raise `Wrong` unless the outputs and all gradients are those of one process; return what the ranks found.

    Args:
        fn: the answer, called with each rank's parts in the order of the case.
        reference: the same layer on one process, called with the whole tensors.
        case: sizes.
        one_sum: the gradient, or output, that the ranks must sum; named when each has a summand alone.
    """
    results = list(on_ranks(_step, case.num_ranks, fn, case, case=str(case)))
    expected = on_ranks(_expected, case.num_ranks, reference, case, case="the reference")
    for name in expected[0]:
        parts = [found.tensors[name] for found in results]
        wholes = [values[name] for values in expected]
        for rank, (part, whole) in enumerate(zip(parts, wholes, strict=True)):
            if (problem := _why_different(name, part, whole, case.num_ranks)) is None:
                continue
            if name == one_sum and _are_summands(parts, whole):
                problem = f"each rank has its own summand of {name}; their sum is right, and nobody has it"
            raise Wrong(f"{case}: rank {rank}: {problem}")
    if any(found.has_changed for found in results):
        raise Wrong(f"{case}: an argument or the gradient that came in has changed; send a copy of it")
    return results


def check_bytes(results: Sequence[Found], forward: int, backward: int, case: Case, why: str) -> None:
    """Raise `Wrong` unless the ranks summed so many bytes in each direction."""
    for way, size, sent in (
        ("forward", forward, sum(found.forward_bytes for found in results)),
        ("backward", backward, sum(found.backward_bytes for found in results)),
    ):
        needed = 2 * (case.num_ranks - 1) * size
        if sent != needed:
            raise Wrong(f"{case}: in the {way} the ranks sent {sent:,} bytes in all, {needed:,} are needed. {why}")


def num_bytes(shape: Shape) -> int:
    """Bytes of a float64 tensor."""
    return 8 * prod(shape)


def draw(name: str, shape: Shape) -> "Tensor":
    """Whole numbers by name: sums are exact in any order."""
    import torch

    seed = sum(map(ord, name)) + 31 * len(shape)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).double() / 4


def _part(tensor: "Tensor", dim: int | None, rank: int, num_ranks: int) -> "Tensor":
    if dim is None:
        return tensor.clone()
    size = -(-tensor.shape[dim] // num_ranks)
    start = min(rank * size, tensor.shape[dim])
    return tensor.narrow(dim, start, min(size, tensor.shape[dim] - start)).clone()


def _step(rank: int, world_size: int, fn: Callable[..., Any], case: Case) -> Found:
    from dualpipe_lab.world.context import rank_context

    def sent() -> tuple[int, int]:
        entries = rank_context().ledger.entries.values()
        return sum(entry.sent for entry in entries), sum(entry.count for entry in entries)

    parts = {
        name: _part(draw(name, shape), case.cuts[name], rank, world_size).requires_grad_()
        for name, shape in case.shapes.items()
    }
    before = {name: part.detach().clone() for name, part in parts.items()}
    began = sent()
    y = fn(*parts.values())
    middle = sent()
    dy = _part(draw("dy", case.out_shape), case.out_cut, rank, world_size)
    kept = dy.clone()
    found = {"y": _plain(y)}
    if found["y"] is not None and found["y"][0] == tuple(dy.shape):
        y.backward(dy)
    found |= {f"d{name}": _plain(part.grad) for name, part in parts.items()}
    same = all(before[name].equal(part.detach()) for name, part in parts.items()) and kept.equal(dy)
    end = sent()
    return Found(found, middle[0] - began[0], end[0] - middle[0], end[1] - middle[1], not same)


def _expected(
    rank: int, world_size: int, reference: Callable[..., Any], case: Case
) -> dict[str, tuple[Shape, list[float]]]:
    wholes = {name: draw(name, shape).requires_grad_() for name, shape in case.shapes.items()}
    y = reference(*wholes.values())
    y.backward(draw("dy", case.out_shape))
    found = {"y": (y.detach(), case.out_cut)}
    found |= {f"d{name}": (whole.grad, case.cuts[name]) for name, whole in wholes.items()}
    plain = {name: _plain(_part(tensor, cut, rank, world_size)) for name, (tensor, cut) in found.items()}
    return {name: values for name, values in plain.items() if values is not None}


def _plain(tensor: object) -> tuple[Shape, list[float]] | None:
    import torch

    if not isinstance(tensor, torch.Tensor):
        return None
    return tuple(tensor.shape), [float(value) for value in tensor.detach().flatten().tolist()]


def _why_different(
    name: str, found: tuple[Shape, list[float]] | None, expected: tuple[Shape, list[float]], num_ranks: int
) -> str | None:
    if found is None:
        return f"{name} is missing; " + ("return a tensor" if name == "y" else "no gradient has arrived there")
    if found[0] != expected[0]:
        return f"{name} has shape {list(found[0])}, this rank's is {list(expected[0])}"
    ours, theirs = found[1], expected[1]
    if (off := difference(ours, theirs)) is None:
        return None
    known = {num_ranks: ", the number of ranks", 1 / num_ranks: ", one over the number of ranks"}
    if off.ratio and (len(theirs) > 1 or off.ratio in known):
        return f"{name} is {off.ratio:.4g} times that of one process{known.get(off.ratio, '')}"
    both = apart(ours[off.place], theirs[off.place], off.allowed)
    return f"{name} differs from one process: number {off.place} {both}"


def _are_summands(parts: Sequence[tuple[Shape, list[float]] | None], whole: tuple[Shape, list[float]]) -> bool:
    rows = [part[1] for part in parts if part is not None and part[0] == whole[0]]
    if len(rows) != len(parts) or all(row == rows[0] for row in rows):
        return False
    sums = [sum(column) for column in zip(*rows, strict=True)]
    return close(sums, whole[1])
