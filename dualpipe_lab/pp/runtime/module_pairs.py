"""Pairs that a module runs itself, by DeepSeek's `overlapped_forward_backward`.

Chapter: book/pp/dualpipe-overlap.  In: modules whose class has the method.  Out: the results of an overlapped pair.
  outputs0, loss0 = overlapped_forward_backward(
      module0, inputs0, criterion0, labels0, module1, loss1, outputs1, output_grads1)
The method runs the forward of module0, and the backward of module1 from loss1 or else from outputs1 and their
gradients, in any order or in pieces.  On the last stage loss0 is criterion0(*outputs0, *labels0), which is weighted
already; on other stages criterion0 is None and labels0 empty.  Gradients of inputs and weights go to `.grad`.
Elsewhere: DeepSeek's DualPipe, which runs both halves in turn if the two modules differ in class.
Source: DeepSeek-AI 2025, github.com/deepseek-ai/DualPipe, examples/example_dualpipe.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from dualpipe_lab.pp.program import B
from dualpipe_lab.pp.runtime.stage import (
    Live,
    NamedTensors,
    ReadyAction,
    Stage,
    Tensors,
    WithLoss,
    as_tensors,
    run_pair_serially,
    scaled,
)

METHOD = "overlapped_forward_backward"


@dataclass
class LiveOutputs(Live):
    """Also the tensors at which the method starts a backward: the loss, or the outputs with a graph."""

    outputs: list[Tensor] = field(default_factory=list)
    loss: Tensor | None = None


class ModuleStage(Stage):
    """A stage for `run_pair_by_module`: its module's class has `overlapped_forward_backward`.

    It keeps the outputs of each microbatch until the backward.  Raises ValueError for a class without the method, and
    in a step for what the method cannot be given: dictionaries, extra inputs and WithLoss.
    """

    def __init__(self, index: int, module: nn.Module) -> None:
        if not hasattr(type(module), METHOD):
            raise ValueError(
                f"stage {index} is a {type(module).__name__}, whose class has no {METHOD}; write the method, or pass "
                "the module itself"
            )
        super().__init__(index, module)

    def call(self, microbatch: int, inputs: Tensors, extra: Mapping[str, Any]) -> Any:
        """Run the module; ValueError as `check_plain`."""
        output = super().call(microbatch, inputs, extra)
        self.check_plain(inputs, extra, output)
        return output

    def check_plain(self, inputs: Tensors, extra: Mapping[str, Any], output: Any) -> None:
        """Raise ValueError for what the method cannot be given."""
        if extra or isinstance(inputs, NamedTensors) or isinstance(output, WithLoss | Mapping):
            raise ValueError(
                f"stage {self.index}: {METHOD} takes and returns lists of tensors, and no dictionary, extra input or "
                "WithLoss; use overlapped=run_pair_serially with plain modules"
            )

    def keep(self, inputs: Tensors, output: Tensors, loss: Tensor | None) -> Live:
        """Return what a backward by autograd needs, and the tensors at which one by the method starts."""
        live = super().keep(inputs, output, loss)
        return LiveOutputs(**vars(live), outputs=[y for y in output if y.requires_grad], loss=loss)


def run_pair_by_module(forward: ReadyAction, backward: ReadyAction) -> None:
    """Run an overlapped pair of two `ModuleStage` by the method of their modules' class.

    Raises ValueError for other stages, modules of two classes, and a backward that is an input gradient alone; for a
    loss that criterion0 has not returned; and if no input of module1 has a gradient afterwards.
    """
    stage, other, name = forward.stage, backward.stage, METHOD
    if not (isinstance(stage, ModuleStage) and type(other) is type(stage) and type(other.module) is type(stage.module)):
        raise ValueError(
            f"stages {stage.index} and {other.index} cannot run as a pair by {name}: both must be a ModuleStage of one "
            f"class, got {_class_of(stage)} and {_class_of(other)}"
        )
    if backward.action.kind != B:
        raise ValueError(f"{name} runs whole backwards, got {backward.action}; use overlapped=run_pair_serially")
    live = other.live[backward.action.microbatch]
    assert isinstance(live, LiveOutputs)
    if not live.roots:  # no gradient, such as for the weight 0
        run_pair_serially(forward, backward)
        return
    losses: list[Tensor | None] = []

    def criterion(*outputs_and_labels: Any) -> Tensor:
        assert forward.loss_of is not None
        *outputs, target = outputs_and_labels
        loss = scaled(forward.loss_of(target, *outputs), forward.weight, outputs)
        losses.append(loss)
        return loss

    hooks_before, inputs = stage.count_hooks(), stage.as_leaves(forward.inputs)
    of_last_stage = (None, []) if forward.loss_of is None else (criterion, [forward.target])
    output_grads = [backward.inputs[position] for position in live.sent]
    output, loss = getattr(type(stage.module), name)(
        stage.module, list(inputs), *of_last_stage, other.module, live.loss, live.outputs, output_grads
    )
    stage.check_plain(inputs, forward.extra, output)
    if loss is not (losses or [None])[-1] or (loss is None) != (forward.loss_of is None):
        raise ValueError(
            f"{name} of stage {stage.index} must return the loss that criterion0 has returned, and None without one"
        )
    if live.inputs and all(x.grad is None for x in live.inputs):
        raise ValueError(
            f"{name} has not run the backward of stage {other.index}; call loss1.backward(), or "
            "torch.autograd.backward(outputs1, output_grads1) if loss1 is None"
        )
    result = output if isinstance(output, Tensor) else tuple(output)
    tensors = as_tensors(f"stage {stage.index}", result) if loss is None else ()
    done = stage.end_forward(forward.action.microbatch, inputs, tensors, loss, hooks_before)
    forward.result, forward.loss = done.output, done.loss
    del other.live[backward.action.microbatch]
    backward.result = live.input_grads()


def _class_of(stage: Stage) -> str:
    return f"{type(stage).__name__}({type(stage.module).__name__})"
