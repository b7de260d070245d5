"""Judging gradients: the learner's step on real ranks against one process, in float64.

equal gradients     max |a - b| <= 1e-12 max(1, max |b|)
live activations    what autograd keeps for the backward, counted by its own hooks
"""

from collections.abc import Callable, Sequence
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from dualpipe_lab.checks.differences import TOLERANCE, apart, difference
from dualpipe_lab.checks.exercise import Wrong
from dualpipe_lab.checks.start.ranks import SENDS, check_messages_only
from dualpipe_lab.checks.switched_off import Without
from dualpipe_lab.checks.trial import on_ranks
from dualpipe_lab.world.launcher import Results

if TYPE_CHECKING:
    from torch import Tensor, nn

WIDTH, ROWS = 4, 3


def without_library(fn: Callable[..., Any]) -> Without:
    """The function with all of the library's own builders switched off: the exercise is to write one."""
    from dualpipe_lab.pp import schedules

    parts = [f"{schedules.__name__}.{found.name}" for found in iter_modules(schedules.__path__)]
    return Without(fn, "dualpipe_lab.pp.lowering:lower", *parts)


def check_step(fn: Callable[..., Any], num_ranks: int, num_microbatches: int) -> None:
    """Raise `Wrong` unless a pipeline step gives the gradients of one process, with little memory and few messages."""
    case = f"{num_ranks} rank(s), {num_microbatches} microbatch(es)"
    results = on_ranks(_step, num_ranks, fn, num_microbatches, case=case)
    expected = on_ranks(reference, 1, num_ranks, num_microbatches, case="the reference")[0]
    for rank, (found, calls, peak, one) in enumerate(results):
        _compare(found, expected[rank], f"{case}: rank {rank}", num_microbatches)
        if calls != 2 * num_microbatches:
            raise Wrong(
                f"{case}: rank {rank} ran its stage {calls} times, expected {2 * num_microbatches}: "
                "once in the forward, and again in the backward"
            )
        if peak > one:
            raise Wrong(
                f"{case}: on rank {rank} autograd keeps {peak} tensors at once, one microbatch needs {one} at most; "
                "run the forwards under torch.no_grad() and keep only the stage's input"
            )
    _check_messages(results, num_ranks, num_microbatches, case)


def check_gradients(results: Sequence[list[list[float]]], num_ranks: int, case: str, num_microbatches: int = 1) -> None:
    """Raise `Wrong` unless the gradients of each rank's stage are those of one process."""
    expected = on_ranks(reference, 1, num_ranks, num_microbatches, case="the reference")[0]
    for rank, found in enumerate(results):
        _compare(found, expected[rank], f"{case}: rank {rank}", num_microbatches)


def accumulate_reports(fn: Callable[..., Any], cases: Sequence[tuple[int, ...]]) -> list[str]:
    """Per case of microbatch sizes, what is wrong with `fn(model, loss_fn, inputs, targets)`, or an empty string."""
    reports: list[str] = on_ranks(_accumulate, 1, fn, list(cases), case="accumulating on one process")[0]
    return reports


def _compare(found: list[list[float]], expected: list[list[float]], where: str, num_microbatches: int) -> None:
    if (problem := _difference(found, expected, num_microbatches)) is not None:
        raise Wrong(f"{where}: {problem}")


def _difference(found: list[list[float]], expected: list[list[float]], num_microbatches: int) -> str | None:
    ours, theirs = [x for part in found for x in part], [x for part in expected for x in part]
    if not ours or not any(ours):
        return "its gradients are all zero; did a message arrive, and did the backward start from it?"
    if any(x != x for x in ours):
        return "its gradients are not numbers: the mean over no rows is nan, and nan times 0 is nan"
    off = difference(ours, theirs)
    if off is None:
        return None
    ratio = off.ratio
    if ratio is None:
        return f"its gradients {off}"
    if abs(ratio - num_microbatches) < 1e-9:
        return f"its gradients are {num_microbatches} times too large, which is the number of microbatches"
    return f"its gradients are {ratio:.4g} times those of one process"


def _check_messages(results: Results, num_ranks: int, num_microbatches: int, case: str) -> None:
    check_messages_only(results, case)
    size = ROWS * WIDTH * 8
    for rank in range(num_ranks):
        neighbours = (rank > 0) + (rank < num_ranks - 1)
        sent = sum(results.ledger.sent(name, rank) for name in SENDS)
        if sent != neighbours * num_microbatches * size:
            raise Wrong(
                f"{case}: rank {rank} sent {sent} bytes, expected {neighbours * num_microbatches * size}: "
                f"per microbatch and neighbour one message of {ROWS} x {WIDTH} float64"
            )


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


def reference(rank: int, world_size: int, num_stages: int, num_microbatches: int) -> list[list[list[float]]]:
    """The gradients of each stage, accumulated over the microbatches by one process."""
    from torch import nn

    stages = [make_stage(index) for index in range(num_stages)]
    for x, y in zip(*make_batch([ROWS] * num_microbatches), strict=True):
        (nn.functional.mse_loss(nn.Sequential(*stages)(x), y) / num_microbatches).backward()
    return [grads_of(stage) for stage in stages]


def _step(rank: int, world_size: int, fn: Callable[..., Any], num_microbatches: int) -> tuple[Any, ...]:
    """One rank: its gradients, how often its stage ran, most saved tensors at once, saved tensors of one forward."""
    import torch
    from torch import nn

    from dualpipe_lab.checks.pp.saved import Saved

    stage, inputs, targets = make_stage(rank), *make_batch([ROWS] * num_microbatches)
    probe = Saved()
    with probe:
        kept = nn.functional.mse_loss(stage(inputs[0].clone().requires_grad_()), targets[0])
        one = probe.peak + 1  # the division of the loss may keep one more
        del kept
    calls = []
    stage.register_forward_hook(lambda *_: calls.append(1))
    torch.manual_seed(100 + rank)
    saved = Saved()
    with saved:
        first, last = rank == 0, rank == world_size - 1
        like = torch.empty(ROWS, WIDTH, dtype=torch.float64)
        fn(rank, world_size, stage, inputs if first else None, targets if last else None, num_microbatches, like)
    return grads_of(stage), len(calls), saved.peak, one


def _accumulate(rank: int, world_size: int, fn: Callable[..., Any], cases: list[tuple[int, ...]]) -> list[str]:
    import torch
    from torch import nn

    reports = []
    for rows in cases:
        inputs, targets = make_batch(rows)
        model, twin = make_stage(0), make_stage(0)
        loss = nn.functional.mse_loss(twin(torch.cat(inputs)), torch.cat(targets))
        loss.backward()
        found = fn(model, nn.functional.mse_loss, inputs, targets)
        problem = _difference(grads_of(model), grads_of(twin), len(rows))
        if problem is None and not abs(float(found) - loss.item()) <= TOLERANCE * max(1.0, loss.item()):
            both = apart(float(found), loss.item())
            problem = f"the returned loss is {both.found}, that of the whole batch is {both.expected}{both.why}"
        reports.append(f"microbatches of {', '.join(map(str, rows))} rows: {problem}" if problem else "")
    return reports
