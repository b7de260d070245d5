"""`fits`: the plans of a model over so many GPUs that fit, the fastest first, and of those alike the simplest first.

Chapter: book/whole/plan-your-run.  In: a model, GPUs, their memory, the shape of a step.  Out: plans, bytes, seconds.
  candidates   every grid of the ranks with tp inside of a node and ep within the data ranks, microbatches of 1, 2 and 4
               sequences, the schedules, ZeRO-1 to 3, with and without recomputation; sequence parallelism with tp
  order        seconds at the point of `estimate`, of which those without dp's are a bound from below: of each grid and
               schedule the fastest candidate that fits is here, and no grid that is left out is faster
  groups       seconds within 5% of the first of a group, which is less than the estimate knows; fewer axes first
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import product

from dualpipe_lab.models.stage_rules import ModelConfig
from dualpipe_lab.plan.estimate import POINT, Estimate, Step, estimate
from dualpipe_lab.plan.fields import text_table
from dualpipe_lab.plan.hardware import H100, Hardware
from dualpipe_lab.plan.memory import fitting_bytes, model_states
from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.plan.rules import first_problem, grids, has_experts

_ROWS = (1, 2, 4)  # sequences of a microbatch
_ALIKE = 1.05


@dataclass(frozen=True)
class Fit:
    """A plan that fits."""

    plan: Plan
    bytes: int  # of the fullest rank
    estimate: Estimate  # seconds of a step
    group: int = 0  # those with one number are as fast as each other, as far as the estimate knows


class Fits(list[Fit]):
    """Plans that fit; prints as a table."""

    def __str__(self) -> str:
        rows = [("group", "seconds", "GB", "MFU", "plan")]
        for fit in self:
            cells = str(fit.group), str(fit.estimate.seconds), f"{fit.bytes / 1e9:.1f}", f"{fit.estimate.mfu:.0%}"
            rows.append((*cells, str(fit.plan)))
        return text_table(rows)


def fits(
    model: ModelConfig,
    num_gpus: int,
    memory_bytes: float = 80e9,
    *,
    sequence_length: int,
    global_batch: int,
    hardware: Hardware = H100,
    schedules: Sequence[str] = ("1f1b", "zero_bubble_h1", "dualpipev"),
    count: int = 20,
) -> Fits:
    """Return the fastest plans that fit.

    Args:
        model: what is to be trained.
        num_gpus: in all.
        memory_bytes: that `memory` may reach; leave some for the allocator and the libraries of messages.
        sequence_length: tokens of a sequence.
        global_batch: sequences of a step.
        hardware: GPUs and links.
        schedules: to try where a plan has a pipeline; with experts those with pairs overlap them.
        count: plans to return at most.

    Raises:
        ValueError: sequences that no data ranks share evenly.

    >>> from dualpipe_lab.plan import model_of
    >>> found = fits(model_of("llama3.2-1b"), 8, sequence_length=8192, global_batch=64, count=3)
    >>> len(found), found[0].group, all(fit.bytes <= 80e9 for fit in found)
    (3, 0, True)
    """
    shape = sequence_length, global_batch
    candidates: list[tuple[float, int, Plan, int | None]] = []
    states: dict[tuple[object, ...], int] = {}  # of the first rank, whatever the microbatches are
    seconds, timed, number = 0.0, None, -1
    for number, plan in enumerate(_candidates(model, num_gpus, shape, hardware, schedules)):
        key = *plan.sizes.values(), plan.ep, plan.schedule, plan.zero
        if key not in states:
            states[key] = model_states(model, plan).total
        if states[key] > memory_bytes:
            continue
        if timed != (timed := replace(plan, zero=0)):  # the stages of ZeRO have the same bound
            seconds = sum(Step(model, plan, *shape, hardware).parts(POINT).values())
        candidates.append((seconds, number, plan, None))
    if number < 0:
        raise ValueError(
            f"{global_batch} sequences do not divide among the data ranks of {num_gpus} GPUs; use a multiple"
        )
    heapify(candidates)
    found: dict[tuple[object, ...], Fit] = {}
    while candidates and len(found) < count:
        _, number, plan, num_bytes = heappop(candidates)
        key = *plan.sizes.values(), plan.ep, plan.schedule
        if key in found:
            continue
        if num_bytes is not None:
            found[key] = Fit(plan, num_bytes, estimate(model, plan, *shape, hardware=hardware))
            continue
        num_bytes = fitting_bytes(model, plan, *shape, memory_bytes)
        if num_bytes is not None:
            seconds = estimate(model, plan, *shape, hardware=hardware).point
            heappush(candidates, (seconds, number, plan, num_bytes))
    return Fits(_grouped(list(found.values())))


def _candidates(
    model: ModelConfig, num_gpus: int, shape: tuple[int, int], hardware: Hardware, names: Sequence[str]
) -> Iterator[Plan]:
    for grid in grids(Plan(precision="bfloat16"), model, num_gpus):
        share, rest = divmod(shape[1], grid.data_size)
        if rest or grid.tp > hardware.gpus_per_node or grid.has_ep_axis:
            continue
        for num_rows in (rows for rows in _ROWS if share % rows == 0):
            for name in names if grid.pp > 1 else ("1f1b",):
                plan = replace(grid, num_microbatches=share // num_rows, schedule=name, sequence_parallel=grid.tp > 1)
                zeros = (1, 2, 3) if plan.num_copies > 1 else (0,)
                plan = replace(plan, zero=zeros[0])
                if first_problem(plan, model, shape[0]) is None:
                    plan = replace(plan, overlap=has_experts(model) and plan.has_pairs)
                    for recompute, zero in product((False, True), zeros):
                        yield replace(plan, zero=zero, recompute=recompute)


def _grouped(found: list[Fit]) -> Iterator[Fit]:
    group = 0
    while found:
        alike = [fit for fit in found if fit.estimate.point <= _ALIKE * found[0].estimate.point]
        alike.sort(key=lambda fit: (sum(size > 1 for size in fit.plan.sizes.values()), fit.estimate.point))
        yield from (replace(fit, group=group) for fit in alike)
        found, group = found[len(alike) :], group + 1
