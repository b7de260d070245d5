"""`compare_backends`: the same function on GLOO and on NCCL, its results compared and its time on the device measured.

Chapter: book/appendix/gpus; the last cell of every chapter that starts ranks.  In: what `launch` gets, and a tolerance.
Out: the results on NCCL.
Elsewhere: torch's own tests run one body per back end (`MultiProcContinuousTest`); `torch.testing.assert_close` stops
at the first difference and tells sizes apart by type.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from math import inf, isinf
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_lab.launch import accelerator, launcher, payload
from dualpipe_lab.launch.context import rank_context
from dualpipe_lab.launch.launcher import Results

if TYPE_CHECKING:
    from torch import Tensor


def compare_backends(
    fn: Callable[..., Any], world_size: int, *args: Any, tolerance: float, rounds: int = 1, **launch_options: Any
) -> Results:
    """Run `fn(rank, world_size, *args)` on GLOO and on NCCL, and print how far the results are apart.

    Args:
        fn: the function, as for `launch`.
        world_size: number of ranks.
        args: further arguments of `fn`; tensors and modules in them arrive on the rank's device.
        tolerance: largest absolute difference that two numbers of the results may have.
        rounds: calls on NCCL.  The time printed is that of the only one, which includes connecting the ranks, or the
            median of those after the first; each call gets its own copy of `args`.
        launch_options: as for `launch`, for both runs; by default nothing that the ranks print is shown.

    Returns:
        The values of the first call on NCCL, as `launch` returns them.

    Raises:
        AssertionError: the results differ by more than `tolerance`, with the place of the largest difference.
        RankError, RankTimeout, TypeError, ValueError: as `launch`.
    """
    __tracebackhide__ = True
    payload.check_call(fn, world_size, args)
    _check(tolerance, rounds, launch_options)
    options = {"output": "collect"} | launch_options
    expected = launcher.launch(fn, world_size, *args, backend="gloo", **options)
    found = launcher.launch(_timed, world_size, fn, rounds, args, backend="nccl", **options)
    milliseconds = [times for _, times in found]
    found[:] = [value for value, _ in found]
    _report(expected, found, tolerance, world_size, milliseconds)
    return found


def _check(tolerance: float, rounds: int, options: dict[str, Any]) -> None:
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not tolerance >= 0:
        raise ValueError(f"compare_backends needs tolerance >= 0, got {tolerance!r}; 0 asks for equal numbers")
    if type(rounds) is not int or rounds < 1:
        raise ValueError(f"compare_backends needs rounds to be a whole number from 1, got {rounds!r}")
    if "backend" in options:
        raise ValueError(f"compare_backends runs both back ends, got backend={options['backend']!r}; leave it out")


def _report(
    expected: list[Any], found: list[Any], tolerance: float, world_size: int, milliseconds: list[list[float]]
) -> None:
    """Print the largest difference and the time; AssertionError if the difference is beyond the tolerance."""
    __tracebackhide__ = True
    worst = largest_difference(list(expected), list(found))
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''} on NCCL"
    if worst.size > tolerance:
        apart = worst.text if isinf(worst.size) and worst.text else f"{worst.size:.1e} apart"
        raise AssertionError(f"{ranks} and GLOO: results{worst.place} {apart}, at most {tolerance:.1e} allowed")
    per_rank = [median(times[1:] or times) for times in milliseconds]
    calls = len(milliseconds[0]) - 1
    which = "median of the ranks" + (f" and of {calls} call{'s' * (calls > 1)} after the first" if calls else "")
    print(
        f"{ranks} agree with GLOO: largest difference {worst.size:.1e} of at most {tolerance:.1e}; "
        f"{median(per_rank):.2f} ms between CUDA events, {which}"
    )


def _timed(rank: int, world_size: int, fn: Callable[..., Any], rounds: int, args: tuple[Any, ...]) -> Any:
    """Call `fn`; return the value of the first call and the milliseconds of each between two events of the device."""
    device, values, times = accelerator.current(), [], []
    copies = [deepcopy(args) for _ in range(rounds - 1)]
    for call_args in (args, *copies):
        begin, end = device.event(), device.event()
        begin.record()
        value = fn(rank, world_size, *call_args)
        end.record()
        device.synchronize()
        values.append(value)
        times.append(begin.elapsed_time(end))
        if rank_context().world_size > 1 and rounds > 1:
            from dualpipe_lab.comm import barrier

            barrier()
    return values[0], times


class Difference(NamedTuple):
    """A difference between two results: its size, its place in them, and in words where it is no number."""

    size: float
    place: str
    text: str = ""


def largest_difference(left: Any, right: Any) -> Difference:
    """Return the largest absolute difference of two nested results; infinite if their structure or a word differs.

    NaN equals NaN, and an infinity the same infinity.

    >>> largest_difference({"loss": 1.0, "ranks": [1, 2]}, {"loss": 1.5, "ranks": [1, 2]})
    Difference(size=0.5, place='loss', text='')
    """
    ours, theirs = dict(leaves(left)), dict(leaves(right))
    for name in (*ours, *theirs):
        if name not in ours or name not in theirs:
            return Difference(inf, name, "is in one of them alone")
    found = (_difference(name, value, theirs[name]) for name, value in ours.items())
    return max(found, key=lambda one: one.size, default=Difference(0.0, ""))


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what nested dicts, lists and tuples hold, numbers as tensors, with the place of each as a name."""
    import torch

    if isinstance(value, torch.Tensor):
        yield name, (value.to_dense() if value.is_sparse else value).detach().cpu()
    elif isinstance(value, bool | int | float | complex):
        yield name, torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from leaves(one, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from leaves(one, f"{name}[{index}]")
    else:
        yield name, value


def _difference(name: str, left: Any, right: Any) -> Difference:
    import torch

    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.shape != right.shape or left.dtype != right.dtype:
            text = f"{left.dtype} {tuple(left.shape)} against {right.dtype} {tuple(right.shape)}"
            return Difference(inf, name, text)
        apart = distances(left, right).view(-1)
        place = torch.unravel_index(apart.argmax(), left.shape) if left.dim() and len(apart) else ()
        index = f"[{', '.join(str(int(number)) for number in place)}]" if place else ""
        return Difference(float(apart.max()) if len(apart) else 0.0, f"{name}{index}")
    is_equal = type(left) is type(right) and bool(left == right)
    return Difference(0.0, name) if is_equal else Difference(inf, name, f"{_short(left)} against {_short(right)}")


def distances(left: "Tensor", right: "Tensor") -> "Tensor":
    """Return |left - right| of every element, in float64; NaN and the infinities are 0 from themselves alone."""
    import torch

    wide = torch.complex128 if left.is_complex() or right.is_complex() else torch.float64
    first, second = left.cpu().to(wide), right.cpu().to(wide)
    equal = (first == second) | (first.isnan() & second.isnan())
    return torch.where(equal, 0.0, (first - second).abs()).nan_to_num(nan=inf, posinf=inf)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
