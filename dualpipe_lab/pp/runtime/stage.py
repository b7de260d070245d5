"""One stage's work: forward, and backward in one piece (B) or in two (I for the inputs, W for the weights).

Chapter: book/pp/pp-basic.  In: a module, activations, gradients.  Out: the same; weight gradients add up in `.grad`.
Live activations: from F until B, or until W where the backward is split.  The output itself is not kept: a backward
needs only the graph behind it, so an output may be a view.
A stage with a forward or a backward of its own is a subclass that overrides these methods.
An overlapped pair is two `ReadyAction`s.  A hook may run them in any way: one after the other (the default), piece by
piece, or with functions of its own that set `result` themselves.
What crosses a boundary is a tuple of tensors.  A stage may return a dictionary (book/pp/two-towers): its tensors keep
their order, and gradients come back in it, without the integers.  The names travel once, in the header of the boundary;
a module gets them as keyword arguments, a loss function gets the dictionary.
Elsewhere: torch's `PipelineStage` sends tuples and refuses dictionaries; Megatron sends one tensor per boundary.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dualpipe_lab._private import num_hooks
from dualpipe_lab.grad_ready import Synchronizer
from dualpipe_lab.pp.program import Action, B, F, Overlap, ProgramStep, W
from dualpipe_lab.pp.runtime.split_backward import SplitBackward

Tensors: TypeAlias = tuple[Tensor, ...]
Loss: TypeAlias = Callable[[Tensor], Tensor]


class NamedTensors(tuple[Tensor, ...]):
    """The tensors of a dictionary, in its order.

    Attributes:
        names: of the tensors.

    >>> import torch
    >>> NamedTensors({"x": torch.ones(1), "ids": torch.tensor([3])}).names
    ('x', 'ids')
    """

    names: tuple[str, ...]

    def __new__(cls, tensors: Mapping[str, Tensor]) -> "NamedTensors":
        """Keep the tensors and their names."""
        made = super().__new__(cls, tensors.values())
        made.names = tuple(tensors)
        return made

    def named(self) -> dict[str, Tensor]:
        """Return the dictionary."""
        return dict(zip(self.names, self, strict=True))


def names_of(tensors: Tensors) -> tuple[str, ...]:
    """Return the names of tensors: empty ones for a plain tuple."""
    return tensors.names if type(tensors) is NamedTensors else ("",) * len(tensors)


def with_names(tensors: Iterable[Tensor], names: Sequence[str]) -> Tensors:
    """Return tensors under names, or as a plain tuple if the names are empty."""
    return NamedTensors(dict(zip(names, tensors, strict=True))) if any(names) else tuple(tensors)


def call_with(function: Callable[..., Any], tensors: Tensors, extra: Mapping[str, Any]) -> Any:
    """Call a module with a tuple as its arguments, or with a dictionary as its keyword arguments."""
    if not isinstance(tensors, NamedTensors):
        return function(*tensors, **extra)
    if twice := sorted(extra.keys() & set(tensors.names)):
        raise ValueError(f"a stage gets each name once, got {twice} from the stage before and as extra inputs")
    return function(**tensors.named(), **extra)


def output_of(tensors: Tensors) -> Any:
    """Return what a module has returned: a dictionary, a tuple, or a tensor alone."""
    if isinstance(tensors, NamedTensors):
        return tensors.named()
    return tensors if len(tensors) > 1 else tensors[0]


class WithLoss(NamedTuple):
    """The return value of a module that adds to the loss of its microbatch, such as the balance loss of a router.

    The runtime multiplies `loss` (a scalar) by the microbatch's weight and sends `output` to the next stage.
    """

    output: Tensor | Tensors | Mapping[str, Tensor]
    loss: Tensor


class ForwardResult(NamedTuple):
    """The result of F: the tensors for the next stage, and this stage's weighted loss or None; all detached."""

    output: Tensors
    loss: Tensor | None


@dataclass
class Live:
    """The state of a microbatch between its forward and its backward.

    Attributes:
        inputs: the tensors whose gradients the previous stage needs.
        roots: where the backward starts, one for each output that has a graph, then one for the loss.
        sent: the positions of the first roots' gradients among the gradients that the next stage returns.
        seed: the gradient of the loss: 1; None without a loss.
        has_hooks: whether the forward has put hooks on activations.
        split: the backward between its I and its W.
    """

    inputs: Tensors
    roots: list[GradientEdge]
    sent: list[int]
    seed: Tensor | None
    has_hooks: bool = False
    split: SplitBackward | None = None

    def input_grads(self) -> Tensors:
        """Return the gradients of the inputs after a backward; zeros for inputs that it did not reach."""
        return tuple(_or_zeros(x, x.grad) for x in self.inputs)


class Stage:
    """Runs F, B, I and W of one stage's module, and keeps the graph of each microbatch until its backward.

    Attributes:
        takes_loss_weights: whether the backward reaches weights of the module that the loss function uses.
    """

    takes_loss_weights = True

    def __init__(self, index: int, module: nn.Module) -> None:
        self.index, self.module = index, module
        self.live: dict[int, Live] = {}
        self.synchronizers: Collection[Synchronizer] = ()  # of the module's parameters, in a step

    @property
    def num_live(self) -> int:
        """The number of microbatches whose activations are held."""
        return len(self.live)

    def forward(
        self,
        microbatch: int,
        inputs: Tensors,
        extra: Mapping[str, Any] | None = None,
        loss_fn: Loss | None = None,
        weight: float = 1,
    ) -> ForwardResult:
        """F: run the module on the received inputs, and on the extra inputs of this stage.

        `loss_fn` computes the loss of the last stage from its output; `weight` scales every loss.
        """
        before = self.count_hooks()
        inputs = self.as_leaves(inputs)
        output = self.call(microbatch, inputs, extra or {})
        losses = [scaled(output.loss, weight)] if isinstance(output, WithLoss) else []
        tensors = as_tensors(f"stage {self.index}", output)
        if loss_fn is not None:
            losses.append(scaled(loss_fn(*arguments_of(tensors)), weight, tensors))
            tensors = ()
        return self.end_forward(microbatch, inputs, tensors, sum(losses[1:], losses[0]) if losses else None, before)

    def call(self, microbatch: int, inputs: Tensors, extra: Mapping[str, Any]) -> Any:
        """Run the module."""
        return call_with(self.module, inputs, extra)

    def backward(self, microbatch: int, grads: Sequence[Tensor]) -> Tensors:
        """B: accumulate the weight gradients and return the gradients of the inputs."""
        live = self.live.pop(microbatch)
        if live.roots:
            torch.autograd.backward(live.roots, _root_grads(live, grads))
        return live.input_grads()

    def input_grad(self, microbatch: int, grads: Sequence[Tensor]) -> Tensors:
        """I: return the gradients of the inputs and keep what W needs."""
        live = self.live[microbatch]
        live.split = SplitBackward(live.roots, live.inputs, live.has_hooks)
        found = live.split.input_grad(_root_grads(live, grads))
        return tuple(_or_zeros(x, grad) for x, grad in zip(live.inputs, found, strict=True))

    def weight_grad(self, microbatch: int) -> None:
        """W: accumulate the weight gradients."""
        split = self.live.pop(microbatch).split
        assert split is not None, "validate() has seen I before W"
        split.weight_grad()

    def as_leaves(self, inputs: Tensors) -> Tensors:
        """Return the received inputs as leaves of the stage's graph, whose gradients the previous stage needs."""
        leaves = [x.detach() for x in inputs]
        if self.index:  # the first stage's inputs are data, whose gradients no rank needs
            leaves = [x.requires_grad_() if has_gradient(x) else x for x in leaves]
        return with_names(leaves, names_of(inputs))

    def end_forward(
        self, microbatch: int, inputs: Tensors, output: Tensors, loss: Tensor | None, hooks_before: int
    ) -> ForwardResult:
        """Keep what the backward needs, and return the detached results; `hooks_before`: hooks before the forward."""
        if loss is None:
            _check_graph(self, microbatch, inputs, output)
        self.live[microbatch] = live = self.keep(inputs, output, loss)
        live.has_hooks = self.count_hooks() > hooks_before
        detached = with_names((y.detach() for y in output), names_of(output))
        return ForwardResult(detached, None if loss is None else loss.detach())

    def keep(self, inputs: Tensors, output: Tensors, loss: Tensor | None) -> Live:
        """Return what the backward needs of a forward."""
        graded = [y for y in output if has_gradient(y)]
        sent = [position for position, y in enumerate(graded) if y.requires_grad]
        roots = [graded[position] for position in sent]
        if loss is not None and loss.requires_grad:
            roots.append(loss)
        seed = None if loss is None else torch.ones_like(loss)
        inputs_with_grad = tuple(x for x in inputs if x.requires_grad)
        return Live(inputs_with_grad, [get_gradient_edge(y) for y in roots], sent, seed)

    def count_hooks(self) -> int:
        """Return how many hooks have been registered so far, without those of data parallelism."""
        count = num_hooks()
        for owner in self.synchronizers:
            count -= owner.num_hooks
        return count


@dataclass
class ReadyAction:
    """One action whose inputs have arrived, ready to run.

    Attributes:
        stage: the stage that runs it; `stage.module` is its module.
        action: the kind of work, and the microbatch.
        inputs: activations for F, gradients of the outputs for B and I; nothing for the backward of the last stage.
        extra, loss_fn, weight: for F, as `Stage.forward` takes them.
        loss_of, target: for F of the last stage; its loss before the weight is `loss_of(target, *outputs)`.
        full_backward: run B in place of I, and nothing in place of W.
        result: the tensors for the neighbouring stage; None until the action has run.
        loss: after F, the weighted loss of this stage, if it has one.
    """

    stage: Stage
    action: Action
    inputs: Tensors = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    loss_of: Callable[..., Tensor] | None = None
    target: Any = None
    weight: float = 1
    full_backward: bool = False
    result: Tensors | None = None
    loss: Tensor | None = None

    @property
    def loss_fn(self) -> Loss | None:
        """The loss as a function of the outputs; None where the stage has none."""
        return None if self.loss_of is None else partial(self.loss_of, self.target)

    def run(self) -> None:
        """Run the action on its stage and set `result`."""
        _, kind, microbatch = self.action
        if kind == F:
            forward = self.stage.forward(microbatch, self.inputs, self.extra, self.loss_fn, self.weight)
            self.result, self.loss = forward.output, forward.loss
        elif kind == B or (kind != W and self.full_backward):
            self.result = self.stage.backward(microbatch, self.inputs)
        elif kind != W:
            self.result = self.stage.input_grad(microbatch, self.inputs)
        else:
            if not self.full_backward:
                self.stage.weight_grad(microbatch)
            self.result = ()


Overlapped: TypeAlias = Callable[[ReadyAction, ReadyAction], None]
SpanTitle: TypeAlias = tuple[str, int, int, str, tuple[Action, Action] | None]


def run_pair_serially(forward: ReadyAction, backward: ReadyAction) -> None:
    """Run the forward of an overlapped pair, then its backward; nothing overlaps."""
    forward.run()
    backward.run()


def span_title(step: ProgramStep) -> SpanTitle:
    """Return kind, stage, microbatch, label and pair of a step's span, as the simulator writes them."""
    if isinstance(step, Overlap):
        return "F&B", step.forward.stage, step.forward.microbatch, str(step), (step.forward, step.backward)
    return step.kind, step.stage, step.microbatch, str(step), None


def tensors_in(given: Any) -> list[Tensor]:
    """Return the tensors among a value, or the values of a tuple, list or dictionary."""
    values = given.values() if isinstance(given, Mapping) else given if isinstance(given, (tuple, list)) else (given,)
    return [value for value in values if isinstance(value, Tensor)]


def has_gradient(x: Tensor) -> bool:
    """Whether the next stage returns a gradient for a tensor: for floats, and not for integers."""
    return bool(x.is_floating_point() or x.is_complex())


def as_tensors(who: str, output: Any, verb: str = "return") -> Tensors:
    """Return the tensors of a module's output; TypeError if the output is something else."""
    if isinstance(output, Tensor):
        return (output,)
    if isinstance(output, WithLoss):
        output = output.output
    values = tuple(output.values()) if isinstance(output, Mapping) else output
    tensors = values if isinstance(values, tuple) else (values,)
    for y in tensors:
        if not isinstance(y, Tensor):
            raise TypeError(
                f"{who} must {verb} a tensor, a tuple of tensors or WithLoss(output, loss), where a dictionary of "
                f"tensors may replace the tuple, got {type(y).__name__}"
            )
    if not isinstance(output, Mapping):
        return tensors
    if wrong := [name for name in output if not (isinstance(name, str) and name.isidentifier())]:
        raise TypeError(f"{who} names its tensors as Python names arguments, got {wrong}; rename them")
    return NamedTensors(output)


def _check_graph(stage: Stage, microbatch: int, inputs: Tensors, output: Tensors) -> None:
    """Refuse an output of weights to which no gradient can return; a stage that is left out returns its input."""
    is_cut = not any(y.requires_grad or any(y is x for x in inputs) for y in output)
    is_cut = is_cut and any(map(has_gradient, output))  # integers alone are refused where they would leave
    if torch.is_grad_enabled() and is_cut and any(weight.requires_grad for weight in stage.module.parameters()):
        raise ValueError(
            f"stage {stage.index} returned tensors without a graph for microbatch {microbatch}, so that neither its "
            "weights nor those before it would train; remove detach() or torch.no_grad() from its forward, or freeze "
            "its weights with requires_grad_(False)"
        )


def arguments_of(tensors: Tensors) -> tuple[Any, ...]:
    """Return what a loss function gets for the output of the last stage: its tensors, or one dictionary."""
    return (tensors.named(),) if isinstance(tensors, NamedTensors) else tensors


def scaled(loss: Tensor, weight: float, outputs: Iterable[Any] = ()) -> Tensor:
    """Return weight * loss; for weight 0 that of the outputs, as a mean over no tokens is no number, nor its gradient.

    Its backward runs, with gradients of 0: data ranks whose microbatch has tokens expect ZeRO-3's gathers.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"the loss of a microbatch is a tensor, got {type(loss).__name__}; leave out item() and float()"
        )
    if loss.numel() != 1 or not has_gradient(loss):
        raise ValueError(f"the loss of a microbatch is one number, got shape {tuple(loss.shape)} of {loss.dtype}")
    if weight:
        return loss * weight
    zeros = [(y * 0).sum().to(loss) for y in outputs if isinstance(y, Tensor) and y.requires_grad]
    return sum(zeros, torch.zeros_like(loss.detach()))


def _root_grads(live: Live, grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient of every root."""
    incoming = [grads[position] for position in live.sent]
    if len(incoming) < len(live.roots):  # the last root is the loss
        assert live.seed is not None
        incoming.append(live.seed)
    return incoming


def _or_zeros(x: Tensor, grad: Tensor | None) -> Tensor:
    return torch.zeros_like(x) if grad is None else grad
