"""`PipelineRuntime`: executes one rank's part of a pipeline program, action by action.

Chapter: book/pp/gpipe.  In: a program, this rank's modules, microbatches.  Out: losses, gradients in `.grad`.
  gradients   equal to accumulation over the same microbatches on one process, bitwise where the order of sums is equal
  messages    one per boundary, microbatch and direction: (P - 1) * M * 2 in all for one stage per rank
  buffers     `lookahead` per source rank and direction, for any number of microbatches
A step reads from top to bottom: `step`, `_execute` (the rank's list), `_run` (one action or overlapped pair),
`_prepare` (its inputs) and `_finish` (its results).  `PipelineComm` sends and receives.
Elsewhere: torch `_PipelineScheduleRuntime`; Megatron's schedules.py, one function per schedule.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.launch.context import device, rank_context
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.lowering import lower
from dualpipe_lab.pp.program import SEND_B, SEND_F, Action, B, F, Program, ProgramStep, W
from dualpipe_lab.pp.runtime.batch import (
    Evaluation,
    Extra,
    Microbatches,
    SharesAmong,
    StepResult,
    make_batch,
    mean_loss,
)
from dualpipe_lab.pp.runtime.check import (
    Buffers,
    Stages,
    by_number,
    check_loss,
    check_output,
    check_stages,
    check_world,
)
from dualpipe_lab.pp.runtime.p2p import PipelineP2P
from dualpipe_lab.pp.runtime.pipeline_comm import PipelineComm
from dualpipe_lab.pp.runtime.rank_plan import PlannedAction, PlannedStep, RankPlan, choose_lookahead, plan_rank
from dualpipe_lab.pp.runtime.replicated_grads import GradientSync, ReplicatedGrads, has_copies
from dualpipe_lab.pp.runtime.shape_inference import Boundary, BoundaryShapes, GivenShapes, InferredShapes
from dualpipe_lab.pp.runtime.stage import Overlapped, ReadyAction, Stage, output_of, run_pair_serially
from dualpipe_lab.pp.validation.validator import validate


class PipelineRuntime:
    """Executes one rank's part of a pipeline program.

    Args:
        program: any program that `validate` accepts; its ranks are the ranks of `group`.
        stages: for each stage that the program places on this rank, its module, or a `Stage` with a forward and a
            backward of its own: by number in a dictionary or an `nn.ModuleDict` (whose keys are strings: "0"), or in
            the order of their numbers in an `nn.ModuleList`.
        loss_fn: `loss_fn(output, target)`, the mean over the elements of one microbatch's targets but the class -100;
            `output` is what the last stage returns, and a tuple of tensors is spread over the arguments in front of
            `target`.  Where the mean is over something else (another `ignore_index`, class weights, a mask in the
            targets) it returns a pair (sum, count), and its counts follow from the targets alone.
        boundary: an example of the tensors that one stage sends to the next (a tensor or a tuple), or a function from
            the microbatch to such an example; None to infer the shapes: the ranks then exchange them.
        group: the ranks of this pipeline (default: the world).
        cost: nanoseconds of every action, for the emulated clocks; None to measure the time that the work takes.
        overlapped: runs an overlapped pair, given its forward and its backward, a `ReadyAction` each; by default one
            after the other.  On GLOO the forward's result then leaves before the backward begins, unless `cost` is
            given.
        sum_copies: sum the gradients of stages with copies on other ranks as part of each step; by default, wherever
            the program has copies.  The reducers and optimizers of `dualpipe_lab.dp` are found by the stages'
            parameters, and told when gradients are complete.
        lookahead: the number of receives of each stream that are prefetched; 0 launches each receive where the lowered
            program has it.  By default 2 on GLOO and 0 on NCCL, which has no tags: two ranks would first launch their
            receives, each before the send that the other one waits for.

    Attributes:
        program: the program.
        rank: this rank's number in the pipeline.
        p2p: the messages between its ranks.

    Raises:
        ValueError: if sizes or stages do not fit the program, or torch's `fully_shard` does not; for a stage in torch's
            DDP, or a `lookahead` on NCCL; InvalidProgram as `validate`.
    """

    def __init__(
        self,
        program: Program,
        stages: Stages,
        loss_fn: Callable[..., Tensor],
        boundary: Boundary | None = None,
        group: Group | None = None,
        cost: Cost | None = None,
        overlapped: Overlapped = run_pair_serially,
        sum_copies: bool | None = None,
        lookahead: int | None = None,
    ) -> None:
        lowered = lower(program)
        self.program = program
        self.rank = comm.get_rank(group)
        check_world(program, comm.get_world_size(group))
        given = by_number(program.name, program.stages_of(self.rank), stages)
        self._stages = {i: stage if isinstance(stage, Stage) else Stage(i, stage) for i, stage in given.items()}
        self._given, self._given_as = stages, given
        modules = {index: stage.module for index, stage in self._stages.items()}
        self._sum_copies = has_copies(program) if sum_copies is None else sum_copies
        check_stages(program, self.rank, modules, self._sum_copies)
        self._loss_fn, self._is_first = loss_fn, True
        self._context = rank_context()
        self._overlapped = overlapped
        self._cost = cost
        self._ticks = cost.per_stage(program.num_stages) if cost else None

        self._entering = [m for m in range(program.num_microbatches) if program.rank_of(0, m) == self.rank]

        p2p = PipelineP2P(program, group, _device_of(modules))
        lookahead = choose_lookahead(lookahead, p2p.in_order)
        validate(lowered, blocking=p2p.in_order, in_order=p2p.in_order)
        # An emulated pair takes its own time; NCCL matches messages in the order of the program on both ranks.
        in_turn = overlapped is run_pair_serially and cost is None and not p2p.in_order
        self._plan = plan_rank(lowered, self.rank, lookahead, in_turn=in_turn)
        self._forward_plan = plan_rank(lowered, self.rank, lookahead, forward_only=True)
        shapes: BoundaryShapes = InferredShapes(program, self.rank, p2p) if boundary is None else GivenShapes(boundary)
        self._shapes = shapes
        self.p2p = p2p
        self._comm = PipelineComm(program, lowered.ranks[self.rank], p2p, shapes)
        self._replicated = ReplicatedGrads(program, self.rank, p2p, modules)
        self._sync = GradientSync(self._stages, self._replicated, p2p, self._sum_copies)
        self._buffers = {
            index: Buffers(index, module) for index, module in modules.items() if index in self._replicated.mirrors
        }

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        weights: Sequence[float] | SharesAmong | None = None,
        extra: Extra | None = None,
        reduce: str = "mean",
    ) -> StepResult:
        """Run the program once; gradients accumulate in the modules' parameters.

        `runtime.step(x, y)` on every rank is enough, each data rank with its own rows: the optimizers of
        `dualpipe_lab.dp` average over data ranks, as torch's `DistributedDataParallel` does.

        Args:
            inputs: a batch, as a tensor, or as a dictionary or tuple of tensors for a module with several arguments;
                each tensor is split along its first dimension into M equal microbatches.  A list has one
                entry per microbatch already, as a tuple of M entries has unless the targets are a batch.  Read on the
                ranks that hold the first stage; others may leave it out.
            targets: the same for the loss function, on the ranks that hold the last stage; `[None] * M` for a loss
                function that takes none.
            weights: the share of each microbatch in the loss; default 1 / M, or with unequal numbers of elements in
                the targets (a class of -100 is none) those over all of this rank's batch; of a loss that returns
                (sum, count), its counts.  For the mean over all tokens of data ranks with unequal numbers of them,
                give each microbatch's share of all, and the optimizer `reduce="sum"`.
            extra: by stage, further keyword arguments of its module, one mapping per microbatch.
            reduce: "mean" (default), or "sum" to add the losses of the microbatches, or of a pair sum / count.

        Raises:
            ValueError: if a batch does not split, an argument does not have one entry per microbatch or is missing, or
                a stage returns what cannot be sent or differentiated; a note names the rank and the action.  A loss
                that is not the mean of its halves (compared in the first step, unless weights are given), inputs that
                need gradients, a loss or an output without a graph,
                weights of the loss that nobody sums, and buffers that a forward changes in a copy of a stage are
                refused.
        """
        if not torch.is_grad_enabled():
            raise ValueError(
                "step computes gradients, which torch.no_grad() has turned off; use evaluate, or turn it off"
            )
        self._check_kept()
        batch = make_batch(self.program.name, self.program.num_microbatches, inputs, targets, weights, extra, reduce)
        if targets is None and any(map(self._is_last, self._stages)):
            raise ValueError(
                f"rank {self.rank} of the pipeline holds the last stage, which needs targets, got None; give them, or "
                "[None] * M for a loss function that takes none"
            )
        for microbatch in self._entering:
            batch.input(microbatch)
        self._sync.begin_step()
        self._sync.check_shares(batch.weights)
        self._execute(self._plan, batch)
        self._is_first = False
        if self._sum_copies:
            self._sync.sum_copies()
            for index in self._stages:
                if self._sync.needs_mirror(index):
                    self._sync.ready(index)
        return StepResult(batch.loss, batch.losses, batch.peak, self._comm.peak_buffers, batch.stage_losses)

    def evaluate(
        self,
        inputs: Any = None,
        targets: Any = None,
        weights: Sequence[float] | None = None,
        extra: Extra | None = None,
    ) -> Evaluation:
        """Run the forwards alone and keep no activation; the arguments are those of `step`.

        Without `targets`, the ranks of the last stage return its outputs.  The modules keep their mode, training or
        evaluation.
        """
        batch = make_batch(self.program.name, self.program.num_microbatches, inputs, targets, weights, extra)
        with torch.no_grad():
            self._execute(self._forward_plan, batch)
        return Evaluation(batch.loss, batch.losses, batch.outputs)

    def sum_copies(self) -> None:
        """Sum the gradients of every stage that several ranks hold (DualPipe), unless `step` has done so.

        All ranks call it, after `step`.

        Raises:
            ValueError: data parallelism has begun to sum them; by default `step` adds the mirrors first.
        """
        if not self._replicated.is_summed:
            self._sync.check_mirrors()
            self._sync.sum_copies()

    def sum_tied(self, names: Mapping[int, str]) -> None:
        """Sum the gradients of one weight that two or more stages hold, given its name in each.

        All ranks call it, after `sum_copies` where there are any: `runtime.sum_tied({0: "weight", 3: "head.weight"})`.
        With `DDP`, call its `finished_gradients()` first: its sums begin during the step.  An optimizer over a `Mesh`
        adds tied weights itself, and this does nothing.

        Raises:
            ValueError: data parallelism has begun to sum them and has not finished, or shards them.
        """
        if self._sync.check_tied(names):
            self._replicated.sum_tied(names)

    def _check_kept(self) -> None:
        """Raise ValueError if the container of stages has others than those that the runtime trains."""
        now = self._given.values() if isinstance(self._given, Mapping | nn.ModuleDict) else self._given
        for (index, stage), other in zip(self._given_as.items(), now, strict=False):
            if other is not stage:
                raise ValueError(
                    f"stage {index} was replaced after the runtime was made, which goes on with the old one; make a "
                    "new PipelineRuntime(...) and a new optimizer"
                )

    def _execute(self, plan: RankPlan, batch: Microbatches) -> None:
        """Run the steps of a plan in order; every message is launched here, and waited for where it is used."""
        self._comm.begin_step()
        self._shapes.begin_step(batch)
        step: ProgramStep | None = None
        try:
            with _quiet():
                for planned in plan:
                    step = planned.step
                    for receive in planned.prefetched:
                        self._comm.start_receive(receive, prefetch=True)
                    if planned.message is None:
                        self._run(planned, batch)
                    elif planned.message.kind in (SEND_F, SEND_B):
                        self._comm.send(planned.message)
                    else:
                        self._comm.start_receive(planned.message)
                self.p2p.wait_for_sends()
        except Exception as error:
            error.add_note(f"at {step} of {self.program.name!r}, rank {self.rank} of the pipeline")
            raise

    def _run(self, planned: PlannedStep, batch: Microbatches) -> None:
        """Run an action or an overlapped pair: a pair waits for both inputs first and passes both results on last."""
        work = planned.work
        ready = [self._prepare(one, batch) for one in work]
        index, kind, _ = work[0].action
        num_live = 1 if kind == F else 0  # of a pair, the forward comes first
        for stage in self._stages.values():
            num_live += stage.num_live
        batch.peak = max(batch.peak, num_live)
        alone = self._buffers.get(index) if kind == F and len(work) == 1 else None
        with self._context.span(*planned.title):
            started = self._context.clock.now()
            for one, its in zip(work, ready, strict=True):
                self._sync.begin(its, one.ends_stage)
            if alone:
                alone.begin()
            if len(work) > 1:
                self._overlapped(ready[0], ready[1])
            else:
                ready[0].run()
            if alone:
                alone.check()
            for its in ready:
                self._sync.end(its)
            if self._cost and self._ticks:
                self._context.clock.wait_until(started + int(self._cost.of(planned.step, self._ticks)))
        for one, its in zip(work, ready, strict=True):
            self._finish(one, its, batch)

    def _prepare(self, one: PlannedAction, batch: Microbatches) -> ReadyAction:
        """Collect the arguments of an action, and wait for the input from another rank."""
        index, kind, microbatch = one.action
        ready = ReadyAction(self._stages[index], one.action)
        if one.takes:
            ready.inputs = self._comm.take(one.takes)
        if kind == F:
            if not index:
                ready.inputs = batch.input(microbatch)
            ready.extra = batch.extra_of(index, microbatch)
            ready.weight = batch.weights[microbatch]
            if one.is_last_stage and batch.targets is not None:
                ready.loss_of = partial(self._loss_of, batch, one.action)
                ready.target = batch.targets[microbatch]
        elif one.is_full_backward:
            ready.full_backward = type(ready.stage) is Stage
        return ready

    def _loss_of(self, batch: Microbatches, action: Action, target: Any, *outputs: Any) -> Tensor:
        loss = mean_loss(self._loss_fn, batch, action.microbatch, outputs, self._is_first and torch.is_grad_enabled())
        if batch.weights[action.microbatch]:  # that of a microbatch without any target may be a constant
            check_loss(self._stages[action.stage], outputs, loss, self._sync.sums(action.stage))
        return cast(Tensor, loss)

    def _finish(self, one: PlannedAction, done: ReadyAction, batch: Microbatches) -> None:
        """Keep the result of an action for the neighbouring stage; start the sums of complete gradients."""
        index, kind, microbatch = one.action
        if done.result is None:
            raise ValueError(f"the hook for overlapped pairs has not run {one.action}; call run(), or set its result")
        if kind == F:
            self._record(one, done, batch)
        if one.makes:
            if kind == F:
                check_output(index, microbatch, done.result)
            self._comm.keep(one.makes, one.label, done.result)
        if one.ends_stage and kind in (B, W):
            if self._sync.needs_mirror(index):
                self._replicated.start(index)
            else:
                self._sync.ready(index)

    def _record(self, one: PlannedAction, done: ReadyAction, batch: Microbatches) -> None:
        """Store the losses and outputs of a forward."""
        index, _, microbatch = one.action
        if not torch.is_grad_enabled():
            done.stage.live.pop(microbatch, None)  # no backward follows
        if one.is_last_stage:
            if done.result:  # without targets; a loss of the module's own then counts with the earlier stages'
                batch.outputs[microbatch] = output_of(done.result)
            elif done.loss is not None:
                batch.losses[microbatch] = done.loss
        elif done.loss is not None:
            batch.stage_losses[index, microbatch] = done.loss

    def _is_last(self, index: int) -> bool:
        return index == self.program.num_stages - 1


@contextmanager
def _quiet() -> Iterator[None]:
    """Record no span for the wait for a message, which shows as a gap; write messages to the ledger at the end."""
    recorder = rank_context().recorder
    before, recorder.quiet = recorder.quiet, True
    try:
        yield
    finally:
        recorder.quiet = before


def _device_of(modules: Mapping[int, nn.Module]) -> torch.device:
    """Return the device of the weights, on which receive buffers are allocated; without weights that of the rank."""
    weights = (parameter for module in modules.values() for parameter in module.parameters())
    return next((parameter.device for parameter in weights), None) or device()
