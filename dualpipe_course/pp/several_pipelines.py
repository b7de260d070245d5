"""Judging a step of 1F1B that runs in several pipelines at once: gradients, microbatches held, model time.

In: the learner's function, the ranks of each pipeline.  Out: nothing, or `Wrong` naming rank and limit.
  held        on place i of p at most min(m, p - i) microbatches
  time        (m + p - 1) * 3 ticks, with F = 1 and B = 2
"""

from collections.abc import Callable
from typing import Any

from dualpipe_course.comparison import Found, Limit, Numbers, compare_on_ranks
from dualpipe_course.pp import gradients
from dualpipe_course.start.ranks import MS, all_waited_for
from dualpipe_lab.pp.schedules.flush import one_f_one_b_makespan, one_f_one_b_peak_activations

_HELD = "rank {rank} holds {found:g} microbatches, 1F1B holds {most:g} at its place in the pipeline"
_TICKS = "all gradients are right, and a step takes {found:g} ticks, 1F1B's takes {most:g}"


def check_step(fn: Callable[..., Any], pipelines: list[list[int]], num_microbatches: int) -> None:
    """Raise `Wrong` unless `fn` runs 1F1B in all pipelines at once."""
    num_ranks = sum(map(len, pipelines))
    depth = len(pipelines[0])
    most = [0] * num_ranks
    for pipeline in pipelines:
        for place, rank in enumerate(pipeline):
            most[rank] = one_f_one_b_peak_activations(depth, num_microbatches, place)
    compare_on_ranks(
        _step,
        num_ranks,
        gradients.without_runtime(fn),
        pipelines,
        num_microbatches,
        case=f"pipelines {pipelines}, {num_microbatches} microbatch(es)",
        why=lambda off: gradients.in_words(off, num_microbatches),
        limits=[
            Limit("held", most, _HELD, scope="each"),
            Limit("ticks", float(one_f_one_b_makespan(depth, num_microbatches)), _TICKS, scope="largest", shows=True),
        ],
        clock="virtual",
    )


class _Held:
    """Counts the microbatches of a stage between their F and their B."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def forward_ends(self, stage: Any, args: Any, y: Any) -> None:
        """Called by the stage after each forward."""
        self.now += 1
        self.peak = max(self.peak, self.now)
        if y.requires_grad:
            y.register_hook(self.backward_begins)

    def backward_begins(self, dy: Any) -> None:
        """Called by autograd with the gradient of the stage's output."""
        self.now -= 1


def _step(
    rank: int, world_size: int, fn: Callable[..., Any], pipelines: list[list[int]], num_microbatches: int
) -> Found:
    import torch
    from torch import nn

    from dualpipe_course.pp.timed import Timed
    from dualpipe_lab.launch.context import rank_context

    (index,) = (i for i, pipeline in enumerate(pipelines) if rank in pipeline)
    pipeline = pipelines[index]
    place, last = pipeline.index(rank), len(pipeline) - 1
    inputs, targets = gradients.make_batch([gradients.ROWS] * num_microbatches)
    inputs = [x + index for x in inputs]  # every pipeline has its own batch
    stages = [gradients.make_stage(i) for i in range(len(pipeline))]
    for x, y in zip(inputs, targets, strict=True):
        (nn.functional.mse_loss(nn.Sequential(*stages)(x), y) / num_microbatches).backward()
    expected = [value for grads in gradients.grads_of(stages[place]) for value in grads]
    stage, held = gradients.make_stage(place), _Held()
    gradients.leave_gradients(stage)
    timed = Timed(stage, forward_ms=1, backward_ms=2)
    timed.register_forward_hook(held.forward_ends)
    like = torch.empty(gradients.ROWS, gradients.WIDTH, dtype=torch.float64)
    torch.manual_seed(100 + rank)
    mine = inputs if place == 0 else None, targets if place == last else None
    fn(rank, world_size, list(pipeline), timed, *mine, num_microbatches, like)
    all_waited_for()
    found = gradients.found_in(stage)
    costs = {"held": held.peak, "ticks": rank_context().clock.now() / MS}
    return found._replace(expected={"gradients": Numbers((len(expected),), expected)}, costs=costs)
