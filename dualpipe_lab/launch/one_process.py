"""`same_as_one_process`: what a function returns on several ranks beside one process.

Chapter: every one that proves gradients.  In: a function that returns its numbers on each rank.  Out: one sentence.
  whole      a value with the shape that one process has must be equal on every rank that returns it
  shards     values that are shorter along one dimension lie one behind the other, in the order of the ranks; the last
             of them may end in zeros of padding, fewer than there are ranks
  equal      max |a - b| <= tolerance max(1, max |b|); if not, `causes` says what usually makes such a difference
Elsewhere: torch's own tests compare with `DTensor.full_tensor()` after a gather; none names a cause.
"""

from collections.abc import Callable, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any, TypeAlias

from dualpipe_lab.launch import causes, launcher
from dualpipe_lab.launch.compare import distances, leaves

if TYPE_CHECKING:
    from torch import Tensor

FLOAT64 = 1e-12
ByRank: TypeAlias = "dict[int, Tensor]"  # ranks that return the value, in order


def same_as_one_process(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int | Sequence[int] = (2, 4),
    reference: Callable[..., Any] | None = None,
    tolerance: float = FLOAT64,
    **launch_options: Any,
) -> None:
    """Run `fn(rank, world_size, *args)` on several ranks, compare its values with one process, and print the result.

    `fn` returns a tensor, a number, or dicts, lists and tuples of them.  A rank returns the whole value, its shard
    along one dimension, or nothing (None, or a dict without the key) where other ranks have it.

    Args:
        fn: the function, as for `launch`.
        args: further arguments of `fn` and of `reference`.
        ranks: numbers of ranks, one launch for each.
        reference: `reference(*args)` returns what one process has; by default that is `fn` on 1 rank.
        tolerance: largest difference, relative to the largest number of the tensor, or to 1 if that is larger and some
            value is as large.
        launch_options: as for `launch`.

    Raises:
        AssertionError: a value differs; the message has its name, the number of ranks, and the usual cause.
        RankError, RankTimeout, TypeError, ValueError: as `launch`; ValueError also for NaN in one process.

    >>> import torch
    >>> import dualpipe_lab as lab
    >>> def total(rank, world_size):
    ...     part = torch.arange(12.0, dtype=torch.float64).chunk(world_size)[rank].sum()
    ...     lab.comm.all_reduce(part)
    ...     return {"sum": part}
    >>> lab.same_as_one_process(total, ranks=(2, 3))
    equal to one process on 2 and 3 ranks: 1 value, largest difference 0
    """
    __tracebackhide__ = True
    sizes = [ranks] if isinstance(ranks, int) else list(ranks)
    if not sizes:
        raise ValueError("same_as_one_process needs at least one number of ranks, got none; pass ranks=(2, 4)")
    options = {"output": "collect"} | launch_options
    whole = launcher.launch(fn, 1, *args, **options)[0] if reference is None else reference(*args)
    expected = _tensors(whole)
    unit = min(1.0, max(map(_largest, expected.values()), default=0.0))  # 1e-12 of tiny gradients is no proof
    if not expected:
        raise ValueError("one process returns no tensor and no number, so there is nothing to compare; return some")
    if undefined := next((name for name, value in expected.items() if bool((value != value).any())), None):
        raise ValueError(f"{_named(undefined)} has NaN in one process, and what equals it proves nothing")
    worst = 0.0, ""
    for num_ranks in sizes:
        found = [_tensors(value) for value in launcher.launch(fn, num_ranks, *args, **options)]
        if unknown := next((name for values in found for name in values if name not in expected), None):
            raise AssertionError(f"on {num_ranks} ranks: {_named(unknown)} is not among the values of one process")
        for name, value in expected.items():
            by_rank = {rank: values[name] for rank, values in enumerate(found) if name in values}
            worst = max(worst, (_compared(name, by_rank, value, num_ranks, tolerance, unit), name))
    counts = " and ".join(", ".join(map(str, sizes)).rsplit(", ", 1))
    where = f", in {_named(worst[1])}" if worst[0] and worst[1] else ""
    print(
        _in_lines(
            f"equal to one process on {counts} rank{'s' * (sizes != [1])}: "
            f"{len(expected)} value{'s' * (len(expected) > 1)}, largest difference {worst[0]:.1g}{where}"
        )
    )


def _tensors(value: Any) -> "dict[str, Tensor]":
    """Return the tensors and numbers in a nested value, by name."""
    import torch

    found = {name: leaf for name, leaf in leaves(value) if leaf is not None}
    for name, leaf in found.items():
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"{_named(name)} is a {type(leaf).__name__}; return tensors, numbers, and dicts, lists and tuples of "
                "them"
            )
    return found


def _compared(name: str, by_rank: ByRank, expected: "Tensor", num_ranks: int, tolerance: float, unit: float) -> float:
    """Return the largest difference of a value on all ranks that have it; AssertionError if it is too large."""
    __tracebackhide__ = True
    where = f"on {num_ranks} ranks {_named(name)}"
    if not by_rank:
        raise AssertionError(f"{where} is missing: no rank returns it, and one process does")
    if other := {one.dtype for one in by_rank.values()} - {expected.dtype}:
        raise AssertionError(f"{where} is {other.pop()}, and {expected.dtype} in one process")
    is_exact = not (expected.is_floating_point() or expected.is_complex())  # integers are equal or not
    worst, allowed = 0.0, 0.0 if is_exact else tolerance * max(unit, _largest(expected))
    for rank, found in wholes(by_rank, expected, where):
        error = max(_largest(found, expected), float(is_exact and bool((found != expected).any())))
        if not error <= allowed:
            problem = f"{where} differs from one process by {error:.2g} on {rank}, allowed is {allowed:.1g}"
            raise AssertionError(_in_lines(f"{problem}:\n{_cause(by_rank, found, expected, num_ranks)}"))
        worst = max(worst, error)
    return worst


def wholes(by_rank: ByRank, expected: "Tensor", where: str) -> list[tuple[str, "Tensor"]]:
    """Return the full tensor of each rank, or the one that the ranks' shards make up, with the ranks in words."""
    import torch

    if all(one.shape == expected.shape for one in by_rank.values()):
        return [(f"rank {rank}", one) for rank, one in by_rank.items()]
    shapes = [tuple(one.shape) for one in by_rank.values()]
    for dim in range(expected.dim()):
        others = {shape[:dim] + shape[dim + 1 :] for shape in shapes if len(shape) == expected.dim()}
        if others == {(*expected.shape[:dim], *expected.shape[dim + 1 :])}:
            joined = torch.cat(list(by_rank.values()), dim)
            size, padding = expected.shape[dim], joined.shape[dim] - expected.shape[dim]
            if 0 <= padding < len(by_rank) and not joined.narrow(dim, size, padding).any():
                return [(f"ranks {', '.join(map(str, by_rank))}", joined.narrow(dim, 0, size))]
    each = ", ".join(f"{shape} on rank {rank}" for shape, rank in zip(shapes, by_rank, strict=True))
    raise AssertionError(
        f"{where} has the shapes {each}, and {tuple(expected.shape)} in one process; a rank returns the whole value or "
        "its shard along one dimension, and all shards together are the whole: gather what is sharded otherwise"
    )


def _cause(by_rank: ByRank, found: "Tensor", expected: "Tensor", num_ranks: int) -> str:
    """Say what usually makes a tensor differ in this way."""
    import torch

    are_whole = all(one.shape == expected.shape for one in by_rank.values())
    copies = [one.flatten().tolist() for one in by_rank.values()] if are_whole else []
    eps = torch.finfo(expected.dtype).eps if expected.is_floating_point() or expected.is_complex() else 0.0
    flat = found.flatten().tolist(), expected.flatten().tolist()
    return causes.cause(causes.Compared(*flat, copies, num_ranks, expected.shape, eps))


def _in_lines(text: str) -> str:
    """Break lines at the width of a page's column."""
    return "\n".join(fill(line, 78, break_long_words=False, break_on_hyphens=False) for line in text.splitlines())


def _largest(one: "Tensor", other: "Tensor | None" = None) -> float:
    """The largest number of a tensor that is finite, or the largest difference of two."""
    if not one.numel():
        return 0.0
    if other is not None:
        return float(distances(one, other).max())
    return float((one if one.is_complex() else one.double()).abs().nan_to_num(nan=0.0, posinf=0.0).max())


def _named(name: str) -> str:
    return name or "the result"
