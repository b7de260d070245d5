"""`PipelineRuntime`: one rank's part of a pipeline step, action by action.

Chapter: book/pp/gpipe.  In: a program, this rank's modules, microbatches.  Out: losses, gradients in `.grad`.
  gradients   equal accumulation over the same microbatches on one process, bitwise where the order of sums is the same
  messages    one per boundary, microbatch and direction: (P - 1) * M * 2 in all for one stage per rank
A stage that sits on two ranks (DualPipe) has one half of its gradient on each: the caller sums the two.
Elsewhere: torch `_PipelineScheduleRuntime`; Megatron's schedules.py, one function per schedule.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import MESSAGE_KINDS, Action, B, F, Overlap, Program, Step, W, actions_of
from dualpipe_lab.pp.runtime.mailroom import Mailroom
from dualpipe_lab.pp.runtime.stage import Stage
from dualpipe_lab.pp.validator import validate
from dualpipe_lab.world import comm
from dualpipe_lab.world.comm.groups import Group
from dualpipe_lab.world.context import current

LossFn = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class StepResult:
    """What one step leaves besides the gradients.

    Attributes:
        losses: the weighted loss of each microbatch whose last stage is on this rank; their sum over all ranks is the
            loss of the batch.
        peak_activations: the most microbatches, summed over this rank's stages, whose activations were held at once.
    """

    losses: dict[int, Tensor]
    peak_activations: int


class PipelineRuntime:
    """Runs one rank's part of a program.

    Args:
        program: any program that `validate` accepts; its ranks are the ranks of `group`.
        stages: the module of each stage that the program places on this rank.
        loss_fn: `loss_fn(output, target)`, the mean over one microbatch.
        boundary: an example of the tensor between two stages, or a function from the microbatch to one.
        group: the ranks of this pipeline (default: the world).
        cost: nanoseconds of every action, for the emulated clocks; None to let work take the time it takes.
        on_stage_done: called with a stage's module after its last backward of a step, when its gradients are complete:
            data parallelism starts to sum them there, while the other stages still work.

    Raises:
        ValueError: if sizes or stages do not fit the program; InvalidProgram as `validate`.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, nn.Module],
        loss_fn: LossFn,
        boundary: Tensor | Callable[[int], Tensor],
        group: Group | None = None,
        cost: Cost | None = None,
        on_stage_done: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self._program = validate(program)
        self._rank, size = comm.get_rank(group), comm.get_world_size(group)
        if program.num_ranks != size:
            raise ValueError(f"{program.name} is written for {program.num_ranks} ranks, the group has {size}")
        placed = {action.stage for action in program.actions(self._rank)}
        if set(stages) != placed:
            raise ValueError(
                f"{program.name} places stages {sorted(placed)} on rank {self._rank}, got modules for {sorted(stages)}"
            )
        self._stages = {index: Stage(index, module) for index, module in stages.items()}
        self._loss_fn, self._group, self._cost = loss_fn, group, cost
        self._boundary = boundary if callable(boundary) else lambda microbatch: boundary
        self._ticks = cost.per_stage(program.num_stages) if cost else None
        self._on_stage_done = on_stage_done
        own = program.actions(self._rank)
        self._last = {action.stage: action for action in own if action.kind in (B, W)}  # later ones replace earlier

    def step(
        self, inputs: Sequence[Tensor], targets: Sequence[Tensor], weights: Sequence[float] | None = None
    ) -> StepResult:
        """Run the program once; gradients accumulate in the modules' parameters.

        Args:
            inputs: one tensor per microbatch; read on the ranks that hold the first stage.
            targets: one tensor per microbatch; read on the ranks that hold the last stage.
            weights: the share of each microbatch in the loss; default 1 / M for equal ones.  Microbatches of unequal
                numbers of tokens need their shares, or the gradient is not that of the batch.

        Raises:
            ValueError: if there are not as many inputs, targets or weights as microbatches.
        """
        number = self._program.num_microbatches
        weights = weights if weights is not None else [1 / number] * number
        for name, values in (("inputs", inputs), ("targets", targets), ("weights", weights)):
            if len(values) != number:
                raise ValueError(f"{self._program.name} needs {number} {name}, one per microbatch, got {len(values)}")
        batch = _Batch(inputs, targets, weights, Mailroom(self._program, self._rank, self._group))
        context = current()
        before, context.quiet = context.quiet, True
        try:
            for step in self._program.ranks[self._rank]:
                if not (isinstance(step, Action) and step.kind in MESSAGE_KINDS):
                    self._run(step, batch)
            batch.mail.close()
        finally:
            context.quiet = before
        return StepResult(batch.losses, batch.peak)

    def _run(self, step: Step, batch: "_Batch") -> None:
        """Receive, work, send: an overlapped pair receives for both first and sends for both at the end."""
        actions = actions_of(step)
        received = [self._input(action, batch) for action in actions]
        with current().span(*_title(step)):
            started = current().clock.now()
            results = [self._work(action, x, batch) for action, x in zip(actions, received, strict=True)]
            if self._cost and self._ticks:
                ticks = self._cost.of_pair(step, self._ticks) if isinstance(step, Overlap) else self._of(step)
                current().clock.wait_until(started + int(ticks))
        for action, result in zip(actions, results, strict=True):
            if result is not None:
                batch.mail.deliver(action, result)
            if self._on_stage_done and self._last.get(action.stage) == action:
                self._on_stage_done(self._stages[action.stage].module)

    def _of(self, action: Action) -> int:
        assert self._ticks is not None
        return int(self._ticks[action.kind][action.stage])

    def _input(self, action: Action, batch: "_Batch") -> Tensor | None:
        stage, kind, microbatch = action
        if kind == F and stage == 0:
            return batch.inputs[microbatch]
        if kind == W or (kind != F and stage == self._program.num_stages - 1):
            return None
        return batch.mail.receive(action, self._boundary(microbatch))

    def _work(self, action: Action, x: Tensor | None, batch: "_Batch") -> Tensor | None:
        """Do one action; return what the next stage needs, if there is one."""
        index, kind, microbatch = action
        stage = self._stages[index]
        if kind == F:
            assert x is not None
            y = self._forward(stage, microbatch, x, batch)
            batch.peak = max(batch.peak, sum(stage.num_live for stage in self._stages.values()))
            return y
        if kind == W:
            stage.weight_grad(microbatch)
            return None
        dx = (stage.backward if kind == B else stage.input_grad)(microbatch, x)
        return dx if index else None

    def _forward(self, stage: Stage, microbatch: int, x: Tensor, batch: "_Batch") -> Tensor | None:
        if stage.index == self._program.num_stages - 1:
            target, weight = batch.targets[microbatch], batch.weights[microbatch]
            batch.losses[microbatch] = stage.forward(microbatch, x, lambda y: self._loss_fn(y, target) * weight)
            return None
        y = stage.forward(microbatch, x)
        like = self._boundary(microbatch)
        if (y.shape, y.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"stage {stage.index} made {tuple(y.shape)} of {y.dtype} for microbatch {microbatch}, "
                f"the boundary says {tuple(like.shape)} of {like.dtype}"
            )
        return y


@dataclass
class _Batch:
    """The data of one step, its messages, and what it has come to so far."""

    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    weights: Sequence[float]
    mail: Mailroom
    losses: dict[int, Tensor] = field(default_factory=dict)
    peak: int = 0


def _title(step: Step) -> tuple[str, int, int, str, tuple[Action, Action] | None]:
    """Kind, stage, microbatch, label and pair of a step's span, as the simulator writes them."""
    if isinstance(step, Overlap):
        return "F&B", step.forward.stage, step.forward.microbatch, str(step), (step.forward, step.backward)
    return step.kind, step.stage, step.microbatch, str(step), None
