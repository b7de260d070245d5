"""Judging GPipe's step with recomputation: gradients, the order of work, what is held meanwhile, ticks, messages.

Chapter: book/pp/gpipe.  In: the learner's step.  Out: nothing, or `Wrong` naming the rank.
  order    all forwards, then all backwards, both from microbatch 0 on; the last rank may leave the first forwards out
  held     one input per microbatch, what is on its way, and a few tensors of the microbatch in work
  ticks    (m + p - 1)(2 t_F + t_B), with F = 1 and B = 2
"""

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.exercise import Wrong
from dualpipe_course.pp import gradients
from dualpipe_course.pp.gradients import ROWS, WIDTH
from dualpipe_course.start.ranks import MS, SENDS, all_waited_for, check_messages_only
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import on_ranks
from dualpipe_lab.world.launcher import Results

if TYPE_CHECKING:
    from torch import Tensor

CHECKPOINT = "torch.utils.checkpoint:checkpoint"
IN_WORK = 3  # tensors of one microbatch that may be alive when its stage starts: x, and the last y and gradient


class Step(NamedTuple):
    """What one rank did: gradients, microbatches in the order of the stage's starts, memory, its last tick."""

    grads: list[list[float]]
    order: list[int]
    excess: int  # tensors held at the start of a forward, beyond those that are needed then
    saved: int  # most tensors that autograd kept at once
    saved_by_one: int
    ticks: float


def check_step(fn: Callable[..., Any], num_ranks: int, num_microbatches: int) -> None:
    """Raise `Wrong` unless a step gives the gradients of one process, in GPipe's order, time, memory and messages."""
    case = f"{num_ranks} rank(s), {num_microbatches} microbatch(es)"
    results = on_ranks(_step, num_ranks, Without(fn, CHECKPOINT), num_microbatches, case=case, clock="virtual")
    gradients.check_gradients([step.grads for step in results], num_ranks, case, num_microbatches)
    for rank, step in enumerate(results):
        _check_order(step.order, num_microbatches, f"{case}: rank {rank}", is_last=rank == num_ranks - 1)
        if step.saved > step.saved_by_one:
            raise Wrong(
                f"{case}: on rank {rank} autograd keeps {step.saved} tensors at once, one microbatch needs "
                f"{step.saved_by_one} at most; run the forwards under torch.no_grad() and keep only the stage's input"
            )
        if step.excess > 0:
            raise Wrong(
                f"{case}: rank {rank} holds {step.excess} tensor(s) of {ROWS} x {WIDTH} too many; until its backward a "
                "microbatch needs its input and nothing else, no output and no hidden layer"
            )
    ticks, best = max(step.ticks for step in results), 4 * (num_microbatches + num_ranks - 1)
    if ticks > best:
        raise Wrong(
            f"{case}: the step takes {ticks:g} ticks, GPipe's takes {best} (F 1, F again 1, B 2): "
            "some rank could work on a microbatch that is there, and still waits for others",
            picture=results.timeline,
        )
    _check_messages(results, num_ranks, num_microbatches, case)


def _check_order(order: list[int], num_microbatches: int, where: str, is_last: bool) -> None:
    each = list(range(num_microbatches))
    if order == each + each or (is_last and order == each):
        return
    if len(order) != 2 * num_microbatches:
        raise Wrong(
            f"{where} ran its stage {len(order)} times, expected {2 * num_microbatches}: "
            "once in the forward, and again in the backward"
        )
    raise Wrong(f"{where} ran its stage on microbatches {order}, expected {each + each}: all forwards, then the same")


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


class _Watch:
    """Notes on which microbatch a stage starts, and what is held at that moment."""

    def __init__(self, rank: int, num_microbatches: int, inputs: list["Tensor"]) -> None:
        import torch

        self.order: list[int] = []
        self.excess, self._before, self._number = 0, 0, num_microbatches
        with torch.no_grad():
            for below in range(rank):
                inputs = [gradients.make_stage(below)(x) for x in inputs]
        self._inputs = [x.clone() for x in inputs]

    def begin(self) -> None:
        """Everything that is alive now is the check's own."""
        from dualpipe_course.pp.saved import held

        held()
        gc.freeze()  # what is there already need not be looked through at every start
        self._before = held()

    def number_of(self, x: "Tensor") -> int | None:
        """The microbatch whose input this is."""
        import torch

        same = (m for m, known in enumerate(self._inputs) if x.shape == known.shape and torch.allclose(x, known))
        return next(same, None)

    def starts(self, module: Any, args: tuple["Tensor", ...]) -> None:
        """Called by the stage before each forward."""
        from dualpipe_course.pp.saved import held
        from dualpipe_lab.world.context import rank_context

        number = self.number_of(args[0])
        self.order.append(-1 if number is None else number)
        needed = self._number + len(rank_context().in_flight) + IN_WORK
        if any(grad != [gradients.OLD] * len(grad) for grad in gradients.grads_of(module)):
            # a backward has been: the inputs may carry their gradients, and the last weights' may have a name
            needed += len(self.order) + sum(p.numel() for p in module.parameters()) // (ROWS * WIDTH) + 1
        self.excess = max(self.excess, (held() - self._before) // (ROWS * WIDTH) - needed)


def _step(rank: int, world_size: int, fn: Callable[..., Any], num_microbatches: int) -> Step:
    import torch
    from torch import nn

    from dualpipe_course.pp.saved import Saved
    from dualpipe_course.pp.timed import Timed
    from dualpipe_lab.world.context import rank_context

    stage, inputs, targets = gradients.make_stage(rank), *gradients.make_batch([ROWS] * num_microbatches)
    probe = Saved()
    with probe:
        kept = nn.functional.mse_loss(stage(inputs[0].clone().requires_grad_()), targets[0])
        one = probe.peak + 1  # the division of the loss may keep one more
        del kept
    watch, timed = _Watch(rank, num_microbatches, inputs), Timed(stage, forward_ms=1, backward_ms=2)
    timed.register_forward_pre_hook(watch.starts)
    saved = Saved(free=lambda x: x.numel() <= 1 or watch.number_of(x) is not None)  # the inputs are to be kept
    gradients.leave_gradients(stage)
    torch.manual_seed(100 + rank)
    like = torch.empty(ROWS, WIDTH, dtype=torch.float64)
    first, last = rank == 0, rank == world_size - 1
    watch.begin()
    with saved:
        fn(rank, world_size, timed, inputs if first else None, targets if last else None, num_microbatches, like)
    all_waited_for()
    ticks = rank_context().clock.now() / MS
    return Step(gradients.added_to(stage), watch.order, watch.excess, saved.peak, one, ticks)
