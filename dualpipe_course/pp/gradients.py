"""Judging gradients: the learner's step on real ranks against one process, in float64.

equal gradients     max |a - b| <= 1e-12 max(1, max |b|)
what was there      every parameter has a gradient already, to which a step adds
"""

from collections.abc import Callable, Sequence
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Numbers, Off, Values, on_one_process
from dualpipe_course.differences import TOLERANCE, apart, difference
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import on_ranks
from dualpipe_lab.launch.causes import cause_of_ratio

if TYPE_CHECKING:
    from torch import Tensor, nn

WIDTH, ROWS = 4, 3
OLD = 0.5  # every gradient before a step


def without_library(fn: Callable[..., Any]) -> Without:
    """The function with all of the library's own builders switched off: the exercise is to write one."""
    from dualpipe_lab.pp import schedules

    parts = [f"{schedules.__name__}.{found.name}" for found in iter_modules(schedules.__path__)]
    return Without(fn, "dualpipe_lab.pp.lowering:lower", *parts)


def without_runtime(fn: Callable[..., Any]) -> Without:
    """The function with the library's runtime switched off: the exercise is to write a step."""
    return Without(fn, "dualpipe_lab.pp.runtime:PipelineRuntime")


def found_in(module: "nn.Module") -> Found:
    """On a rank: what a step has added to the gradients of `leave_gradients`."""
    added = added_to(module)
    lacks = sum(not part for part in added)
    flat = [value for part in added for value in part]
    refused = f"{lacks} of its parameters have no gradient" if lacks else ""
    return Found({"gradients": Numbers((len(flat),), flat)}, refused=refused)


def beside(num_ranks: int, num_microbatches: int = 1) -> list[Values]:
    """The gradients of each rank's stage, from one process."""
    stages = on_one_process(reference, num_ranks, num_microbatches)
    flat = [[value for part in grads for value in part] for grads in stages]
    return [{"gradients": Numbers((len(values),), values)} for values in flat]


def in_words(off: Off, num_microbatches: int = 1) -> str:
    """How the gradients of a stage differ from those of one process."""
    assert off.found is not None
    return why_different([off.found.flat], [off.expected.flat], num_microbatches) or f"its gradients {off.difference}"


def accumulate_reports(fn: Callable[..., Any], cases: Sequence[tuple[int, ...]]) -> list[str]:
    """Per case of microbatch sizes, what is wrong with `fn(model, loss_fn, inputs, targets)`, or an empty string."""
    reports: list[str] = on_ranks(_accumulate, 1, fn, list(cases), case="accumulating on one process")[0]
    return reports


def why_different(
    found: list[list[float]],
    expected: list[list[float]],
    num_microbatches: int,
    if_zero: str = "did a message arrive, and did the backward start from it?",
) -> str | None:
    """What is wrong with what a step has added to the gradients of parameters, in words, or None."""
    ours, theirs = [x for part in found for x in part], [x for part in expected for x in part]
    if len(ours) != len(theirs):
        return f"{sum(not part for part in found)} of its parameters have no gradient"
    if difference([x + OLD for x in ours], theirs) is None:
        return "the gradients of the step before are gone; a step adds to what is there"
    if not ours or not any(ours):
        return f"its gradients are all zero; {if_zero}"
    if any(x != x for x in ours):
        return "its gradients are not numbers: the mean over no rows is nan, and nan times 0 is nan"
    off = difference(ours, theirs)
    if off is None:
        return None
    if off.ratio is None:
        return f"its gradients {off}"
    known = cause_of_ratio(off.ratio, 1, {num_microbatches: "the number of microbatches"})
    return f"its gradients are {off.ratio:.4g} times those of one process{known}"


def make_stage(rank: int) -> "nn.Module":
    """Stage `rank` of the model, the same in every process."""
    import torch
    from torch import nn

    torch.manual_seed(7 + rank)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)).double()


def make_batch(rows: Sequence[int]) -> tuple[list["Tensor"], list["Tensor"]]:
    """Inputs and targets of microbatches with so many rows."""
    import torch

    generator = torch.Generator().manual_seed(3)
    inputs, targets = (
        [torch.randn(number, WIDTH, dtype=torch.float64, generator=generator) for number in rows] for _ in range(2)
    )
    return inputs, targets


def grads_of(module: "nn.Module") -> list[list[float]]:
    """The gradients of a module's parameters as plain numbers, an empty list where there is none."""
    return [[] if p.grad is None else p.grad.flatten().tolist() for p in module.parameters()]


def leave_gradients(module: "nn.Module") -> None:
    """Give every parameter a gradient of OLD, as if a step had been before."""
    import torch

    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, OLD)


def added_to(module: "nn.Module") -> list[list[float]]:
    """What has been added to the gradients of `leave_gradients`.

    Beside OLD a sum keeps 15 digits, so that within the tolerance nothing is lost.
    """
    return [[value - OLD for value in grads] for grads in grads_of(module)]


def reference(rank: int, world_size: int, num_stages: int, num_microbatches: int) -> list[list[list[float]]]:
    """The gradients of each stage, accumulated over the microbatches by one process."""
    from torch import nn

    stages = [make_stage(index) for index in range(num_stages)]
    for x, y in zip(*make_batch([ROWS] * num_microbatches), strict=True):
        (nn.functional.mse_loss(nn.Sequential(*stages)(x), y) / num_microbatches).backward()
    return [grads_of(stage) for stage in stages]


def _accumulate(rank: int, world_size: int, fn: Callable[..., Any], cases: list[tuple[int, ...]]) -> list[str]:
    from torch import nn

    losses = (nn.functional.mse_loss, nn.functional.l1_loss)
    reports = [next(filter(None, (_accumulate_rows(fn, rows, loss_fn) for loss_fn in losses)), "") for rows in cases]
    named = zip(cases, reports, strict=True)
    return [f"microbatches of {', '.join(map(str, rows))} rows: {report}" if report else "" for rows, report in named]


def _accumulate_rows(fn: Callable[..., Any], rows: tuple[int, ...], loss_fn: Callable[..., Any]) -> str | None:
    """Say what is wrong for microbatches of so many rows and one loss function, if anything."""
    import torch

    inputs, targets = make_batch(rows)
    model, twin = make_stage(0), make_stage(0)
    loss = loss_fn(twin(torch.cat(inputs)), torch.cat(targets))
    loss.backward()
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    leave_gradients(model)
    found = fn(model, loss_fn, inputs, targets)
    if_zero = "does the loss of each microbatch have its backward?"
    if problem := why_different(added_to(model), grads_of(twin), len(rows), if_zero):
        return problem if loss_fn is torch.nn.functional.mse_loss else f"with {loss_fn.__name__}, {problem}"
    if sorted(filter(None, seen)) != sorted(filter(None, rows)):
        return f"the model ran on {', '.join(map(str, seen)) or 'no'} rows; each microbatch goes through it once, alone"
    if not isinstance(found, float):
        kept = "; a tensor keeps its graph: loss.item() is the number" * isinstance(found, torch.Tensor)
        return f"returned {type(found).__name__}, expected the loss as a float{kept}"
    if not abs(found - loss.item()) <= TOLERANCE * max(1.0, loss.item()):
        both = apart(found, loss.item())
        return f"the returned loss is {both.found}, that of the whole batch is {both.expected}{both.why}"
    return None
