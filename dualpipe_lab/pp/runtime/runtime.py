"""`PipelineRuntime`: one rank's part of a pipeline step, action by action.

Chapter: book/pp/gpipe.  In: a program, this rank's modules, microbatches.  Out: losses, gradients in `.grad`.
  gradients   equal accumulation over the same microbatches on one process, bitwise where the order of sums is the same
  messages    one per boundary, microbatch and direction: (P - 1) * M * 2 in all for one stage per rank
  buffers     `lookahead` per source rank and direction, however many microbatches there are
  I, then W   on the first stage are one walk, in the time of I; a `Stage` of the caller's own keeps them apart
Elsewhere: torch `_PipelineScheduleRuntime`; Megatron's schedules.py, one function per schedule.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.lowering import lower
from dualpipe_lab.pp.program import MESSAGE_KINDS, SEND_B, SEND_F, Action, F, Overlap, Program, Step, W, actions_of
from dualpipe_lab.pp.runtime.batch import Batch, Evaluation, Extra, StepResult, make_batch
from dualpipe_lab.pp.runtime.check import check_fully_sharded, check_output, check_stages, check_world
from dualpipe_lab.pp.runtime.gradient_sync import GradientSync
from dualpipe_lab.pp.runtime.p2p import Post
from dualpipe_lab.pp.runtime.pipeline_comm import Mailroom
from dualpipe_lab.pp.runtime.rank_plan import Itinerary, plan_rank
from dualpipe_lab.pp.runtime.replicated_grads import Copies
from dualpipe_lab.pp.runtime.shape_inference import Negotiated
from dualpipe_lab.pp.runtime.shapes import Boundary, Given
from dualpipe_lab.pp.runtime.stage import Stage
from dualpipe_lab.pp.runtime.task import Overlapped, Task, one_after_the_other, title
from dualpipe_lab.world.context import rank_context


class PipelineRuntime:
    """Runs one rank's part of a program.

    Args:
        program: any program that `validate` accepts; its ranks are the ranks of `group`.
        stages: for each stage that the program places on this rank, its module, or a `Stage` with a forward and a
            backward of its own.
        loss_fn: `loss_fn(output, target)`, the mean over one microbatch.
        boundary: an example of what goes from one stage to the next (a tensor or a tuple of them), or a function from
            the microbatch to one; None to have the ranks negotiate it.
        group: the ranks of this pipeline (default: the world).
        cost: nanoseconds of every action, for the emulated clocks; None to let work take the time it takes.
        on_stage_done: called with a stage's module when its gradients are complete: after its last backward of a step,
            or when its mirrors have been added.  The reducers and optimizers of `dualpipe_lab.dp` need no call: the
            runtime finds them by the stages' parameters, and tells them when gradients are complete.
        overlapped: runs an overlapped pair, given its two tasks; by default one after the other.
        sum_mirrors: sum the gradients of stages with copies on other ranks as part of each step.
        lookahead: how many receives of each stream are posted ahead of time; 0 (NCCL needs it) follows the lowered
            program.

    Raises:
        ValueError: if sizes or stages do not fit the program, or torch's `fully_shard` does not; InvalidProgram as
            `validate`.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, nn.Module | Stage],
        loss_fn: Callable[..., Tensor],
        boundary: Boundary | None = None,
        group: Group | None = None,
        cost: Cost | None = None,
        on_stage_done: Callable[[nn.Module], None] | None = None,
        overlapped: Overlapped = one_after_the_other,
        sum_mirrors: bool = False,
        lookahead: int = 2,
    ) -> None:
        self._program, self._rank = program, comm.get_rank(group)
        lowered = lower(program)
        check_world(program, comm.get_world_size(group))
        check_stages(program, self._rank, stages)
        self._stages = {i: stage if isinstance(stage, Stage) else Stage(i, stage) for i, stage in stages.items()}
        modules = {index: stage.module for index, stage in self._stages.items()}
        check_fully_sharded(program, self._rank, modules, sum_mirrors)
        self._post = Post(program, group, _device(modules, boundary))
        self._shapes = Negotiated(program, self._rank, self._post) if boundary is None else Given(boundary)
        self._plan = plan_rank(lowered, self._rank, lookahead)
        self._forwards = plan_rank(lowered, self._rank, lookahead, forward_only=True)
        self._loss_fn, self._overlapped, self._on_stage_done = loss_fn, overlapped, on_stage_done
        self._cost, self._ticks = cost, cost.per_stage(program.num_stages) if cost else None
        self._copies, self._sums_mirrors = Copies(program, self._rank, self._post, modules), sum_mirrors
        self._sync = GradientSync(self._stages, self._copies, self._post, sum_mirrors)

    def step(
        self,
        inputs: Sequence[Any],
        targets: Sequence[Any],
        weights: Sequence[float] | None = None,
        extra: Extra | None = None,
    ) -> StepResult:
        """Run the program once; gradients accumulate in the modules' parameters.

        Args:
            inputs: one tensor (or tuple) per microbatch; read on the ranks that hold the first stage.
            targets: one per microbatch; read on the ranks that hold the last stage.
            weights: the share of each microbatch in the loss; default 1 / M for equal ones.  Microbatches of unequal
                numbers of tokens need their shares (`token_shares`), or the gradient is not that of the batch.
            extra: by stage, the keyword arguments that its module gets besides, one mapping per microbatch.

        Raises:
            ValueError: if there are not as many of them as microbatches, or a stage returns what cannot be sent or
                differentiated; a note names the rank and the action.
        """
        batch = make_batch(self._program.name, self._program.num_microbatches, inputs, targets, weights, extra)
        self._sync.begin_step()
        buffers = self._execute(self._plan, batch)
        if self._sums_mirrors:
            self._copies.finish()
            for index in filter(self._sync.waits, self._stages):
                self._complete(index)
        return StepResult(batch.losses, batch.peak, buffers, batch.stage_losses)

    def evaluate(
        self,
        inputs: Sequence[Any],
        targets: Sequence[Any] | None = None,
        weights: Sequence[float] | None = None,
        extra: Extra | None = None,
    ) -> Evaluation:
        """Run the forwards alone and keep no activation; the arguments are those of `step`.

        Without `targets`, the ranks of the last stage return its outputs.  The modules stay in the mode, training or
        evaluation, that they are in.
        """
        batch = make_batch(self._program.name, self._program.num_microbatches, inputs, targets, weights, extra)
        with torch.no_grad():
            self._execute(self._forwards, batch)
        return Evaluation(batch.losses, batch.outputs)

    def sum_mirrors(self) -> None:
        """Sum the gradients of every stage that several ranks hold (DualPipe); all ranks call it, after `step`.

        Raises:
            ValueError: data parallelism has begun to sum them: `sum_mirrors=True` adds the mirrors first.
        """
        self._sync.check_mirrors()
        self._copies.finish()

    def sum_tied(self, names: Mapping[int, str]) -> None:
        """Sum the gradients of one weight that two or more stages hold, given its name in each.

        All ranks call it, after `sum_mirrors` where there are any: `runtime.sum_tied({0: "weight", 3: "head.weight"})`.
        With `Ddp`, call its `finished_gradients()` first: its sums begin during the step.

        Raises:
            ValueError: data parallelism has begun to sum them and has not finished, or shards them.
        """
        self._sync.check_tied(names)
        self._copies.sum_tied(names)

    def _execute(self, plan: Itinerary, batch: Batch) -> int:
        """Walk through a plan; return the peak of the receive buffers."""
        if isinstance(self._shapes, Negotiated):
            self._shapes.begin(batch)
        mail = Mailroom(self._program, self._post, self._shapes)
        step: Step | None = None
        try:
            with _quiet():
                for position, step in enumerate(plan.row):
                    for receive in plan.early.get(position, ()):
                        mail.expect(receive)
                    if isinstance(step, Overlap) or step.kind not in MESSAGE_KINDS:
                        self._run(step, batch, mail, plan)
                    elif step.kind in (SEND_F, SEND_B):
                        mail.send(step)
                    else:
                        mail.receive(step)
                self._post.close()
        except Exception as error:
            error.add_note(f"at {step} of {self._program.name!r}, rank {self._rank} of the pipeline")
            raise
        return mail.peak_buffers

    def _run(self, step: Step, batch: Batch, mail: Mailroom, plan: Itinerary) -> None:
        """Receive, work, deliver: an overlapped pair receives for both first and delivers for both at the end."""
        tasks = [self._task(action, batch, mail) for action in actions_of(step)]
        tasks[0].whole = step in plan.at_once and type(tasks[0].stage) is Stage
        held = sum(stage.num_live for stage in self._stages.values())
        batch.peak = max(batch.peak, held + sum(task.action.kind == F for task in tasks))
        with rank_context().span(*title(step)):
            started = rank_context().clock.now()
            for task in tasks:
                self._sync.begin(task, plan.last)
            if isinstance(step, Overlap):
                self._overlapped(tasks[0], tasks[1])
            else:
                tasks[0].run()
            for task in tasks:
                self._sync.end(task)
            if self._cost and self._ticks:
                rank_context().clock.wait_until(started + int(self._cost.of(step, self._ticks)))
        for task in tasks:
            self._finish(task, batch, mail, plan)

    def _task(self, action: Action, batch: Batch, mail: Mailroom) -> Task:
        """Collect what an action needs, and wait for what comes from other ranks."""
        index, kind, microbatch = action
        task = Task(self._stages[index], action)
        if kind == F:
            task.arrived = mail.take(action) if index else batch.input(microbatch)
            task.extra, task.weight = batch.extra_of(index, microbatch), batch.weights[microbatch]
            if self._is_last(index) and batch.targets is not None:
                target = batch.targets[microbatch]
                task.loss_fn = lambda *outputs: self._loss_fn(*outputs, target)
        elif kind != W and not self._is_last(index):
            task.arrived = mail.take(action)
        return task

    def _finish(self, task: Task, batch: Batch, mail: Mailroom, plan: Itinerary) -> None:
        """Pass on what a task has made, and take note of it."""
        index, kind, microbatch = task.action
        if task.result is None:
            raise ValueError(f"the hook for overlapped pairs has not run {task.action}; call run(), or set its result")
        if kind == F:
            self._note(task, batch)
            if not self._is_last(index):
                check_output(index, microbatch, task.result)
                mail.deliver(task.action, task.result)
        elif kind != W and index:
            mail.deliver(task.action, task.result)
        if plan.last.get(index) == task.action:
            if self._sync.waits(index):
                self._copies.start(index)
            else:
                self._complete(index)

    def _complete(self, index: int) -> None:
        """Let data parallelism start to sum the gradients of a stage."""
        self._sync.ready(index)
        if self._on_stage_done:
            self._on_stage_done(self._stages[index].module)

    def _note(self, task: Task, batch: Batch) -> None:
        """Keep losses and outputs."""
        index, _, microbatch = task.action
        if not torch.is_grad_enabled():
            task.stage.live.pop(microbatch, None)  # nothing will be asked of it
        if self._is_last(index):
            if task.loss is not None:
                batch.losses[microbatch] = task.loss
            elif task.result:
                batch.outputs[microbatch] = task.result if len(task.result) > 1 else task.result[0]
        elif task.loss is not None:
            batch.stage_losses[index, microbatch] = task.loss

    def _is_last(self, index: int) -> bool:
        return index == self._program.num_stages - 1


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave waiting for messages out of the timeline, where it shows as a gap, and the books for the end."""
    context = rank_context()
    before, context.quiet = context.quiet, True
    try:
        yield
    finally:
        context.quiet = before
        context.books.written()


def _device(modules: Mapping[int, nn.Module], boundary: Boundary | None) -> torch.device:
    """Where the buffers are made: where the weights are."""
    for module in modules.values():
        for parameter in module.parameters():
            return parameter.device
    return boundary.device if isinstance(boundary, Tensor) else torch.device("cpu")
