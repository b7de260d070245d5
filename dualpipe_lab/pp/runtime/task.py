"""One action of a step, ready to run: the stage, what has arrived for it, and what becomes of it.

In: an action and its input.  Out: its result.
An overlapped pair is two tasks.  A hook may run them in any way: one after the other (the default), piece by piece, or
with functions of its own that set `result` themselves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from dualpipe_lab.pp.program import Action, B, F, Overlap, Step, W
from dualpipe_lab.pp.runtime.stage import Loss, Stage, Tensors


@dataclass
class Task:
    """One action and its circumstances.

    Attributes:
        stage: the stage that works; `stage.module` is its module.
        action: what to do, on which microbatch.
        arrived: activations for F, gradients for B and I; nothing for the backward of the last stage.
        extra, loss_fn, weight: for F, as `Stage.forward` takes them.
        result: what the next stage needs; None until the task has run.
        whole: let I do what B does, and W nothing.
        loss: after F, the weighted loss of this stage, if it has one.
    """

    stage: Stage
    action: Action
    arrived: Tensors = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: Loss | None = None
    weight: float = 1
    whole: bool = False
    result: Tensors | None = None
    loss: Tensor | None = None

    def run(self) -> None:
        """Do the work as the stage does it."""
        _, kind, microbatch = self.action
        if kind == F:
            done = self.stage.forward(microbatch, self.arrived, self.extra, self.loss_fn, self.weight)
            self.result, self.loss = done.output, done.loss
        elif kind == W:
            if not self.whole:
                self.stage.weight_grad(microbatch)
            self.result = ()
        else:
            backward = self.stage.backward if kind == B or self.whole else self.stage.input_grad
            self.result = backward(microbatch, self.arrived)


Overlapped: TypeAlias = Callable[[Task, Task], None]


def one_after_the_other(forward: Task, backward: Task) -> None:
    """Run an overlapped pair without overlapping anything."""
    forward.run()
    backward.run()


def title(step: Step) -> tuple[str, int, int, str, tuple[Action, Action] | None]:
    """Return kind, stage, microbatch, label and pair of a step's span, as the simulator writes them."""
    if isinstance(step, Overlap):
        return "F&B", step.forward.stage, step.forward.microbatch, str(step), (step.forward, step.backward)
    return step.kind, step.stage, step.microbatch, str(step), None
