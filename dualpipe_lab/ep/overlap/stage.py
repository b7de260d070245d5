"""Pipeline stages of interruptible layers, and the hook with which a pipeline runtime overlaps F&B pairs.

Chapter: book/ep/one-f-one-b-overlap.  In: a program with pairs, such as DualPipe's; layers, or a stage of
`models.build_stages`.  Out: the gradients of the runtime without overlap.
  F, I     their all-to-alls are exposed: there is no other work of the same microbatch
  B        its own weight gradients overlap them; with `fill=False` it is the serial backward
  W        no all-to-all
  F&B      `overlapped_forward_backward`: each half computes while the other half's all-to-alls are under way; a half
           whose stage is not of interruptible layers runs as one piece
ZeRO-3 gathers all weights of a stage when a forward or backward of it begins, and frees them when that has ended.
Give the hook to the runtime: `PipelineRuntime(program, stages, loss_fn, overlapped=overlapped_forward_backward)`.
`interruptible_stage` makes the layers of a V3-style stage; they have its parameters, under the same names:
  layer with experts   A: attention, both norms, router, balance loss; S: the shared expert; D, M, C: routed experts
  dense layer          P
  embedding            P, before the first layer
  norm and head        P, behind the last layer; the loss follows, or is a part of P where it has weights: in chunks,
                       and with a second token
  second token         P, then the extra layer with experts, then a P for both losses, so that the head is used in one
                       piece; the hidden state is kept for it (`LinkedLayer`)
Attention and shared expert keep their own collectives, along tp and cp: they run inside of A and S, and those of the
two halves of a pair come in the same order on every rank, because all execute one order.  Under sequence parallelism
every rank of tp sends all tokens of its group to the experts: A gathers them, and the output is sliced.
The load of a router is counted in A_B, once per microbatch.
Elsewhere: DualPipe's `overlapped_forward_backward(module0, inputs0, criterion0, ...)`, which its user writes; Megatron
`build_transformer_layer_callables` in fine_grained_callables.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dualpipe_lab.dp.flat_parameter import is_absent
from dualpipe_lab.ep.moe import MoE
from dualpipe_lab.ep.overlap.executor import Layer, MicrobatchPass, Pass, execute
from dualpipe_lab.ep.overlap.layer import Given, Linked, LinkedLayer, PlainLayer, Routed, RoutedLayer
from dualpipe_lab.ep.overlap.order import (
    PLAIN,
    ROUTED,
    SHARED,
    Op,
    Order,
    Ticks,
    backward_alone,
    forward_alone,
    input_grads_alone,
    one_f_one_b_overlap,
    weight_grads_alone,
    without_weight_grads,
)
from dualpipe_lab.grad_ready import Synchronizer, synchronizers_of
from dualpipe_lab.pp.program import B, F
from dualpipe_lab.pp.runtime.recompute import recompute
from dualpipe_lab.pp.runtime.stage import ForwardResult, Loss, ReadyAction, Stage, Tensors, scaled
from dualpipe_lab.tp.mappings import TOKENS, gather_from_ranks, gather_output_grad, local_slice


class InterruptibleStage(Stage):
    """A pipeline stage of interruptible layers.

    Args:
        index: the number of the stage.
        layers: in the order of the forward.
        ticks: nanoseconds of every kind of compute, as for `execute`.
        fill: overlap the all-to-alls of an unpaired backward with its own weight gradients.
        module: the module that the layers are made from, with all their parameters (default: a list of the layers).
        has_loss: whether the last layer computes the loss, because that has weights (`LinkedLayer`).
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[Layer],
        ticks: Ticks | None = None,
        fill: bool = True,
        module: nn.Module | None = None,
        has_loss: bool = False,
    ) -> None:
        modules = [layer for layer in layers if isinstance(layer, nn.Module)]
        super().__init__(index, nn.ModuleList(modules) if module is None else module)
        self.layers, self.ticks, self._fill, self._has_loss = list(layers), ticks, fill, has_loss
        self.letters = [layer.letters for layer in layers]
        self.passes: dict[int, MicrobatchPass] = {}

    @property
    def num_live(self) -> int:
        """The number of microbatches whose activations are held."""
        return len(self.passes)

    def forward(
        self,
        microbatch: int,
        inputs: Tensors,
        extra: Mapping[str, Any] | None = None,
        loss_fn: Loss | None = None,
        weight: float = 1,
    ) -> ForwardResult:
        """F: the serial forward."""
        one = self.begin_forward(microbatch, inputs, extra, weight, loss_fn)
        self.execute(forward_alone(one.letters, microbatch), forward=one)
        return self.finish_forward(one, loss_fn, weight)

    def backward(self, microbatch: int, grads: Sequence[Tensor]) -> Tensors:
        """B: input and weight gradients."""
        order = backward_alone(self.letters, microbatch, self._fill)
        self.execute(order, backward=self.begin_backward(microbatch, grads))
        return self.finish_backward(self.passes.pop(microbatch))

    def input_grad(self, microbatch: int, grads: Sequence[Tensor]) -> Tensors:
        """I: input gradients; the tensors that W needs are kept."""
        order = input_grads_alone(self.letters, microbatch)
        self.execute(order, backward=self.begin_backward(microbatch, grads))
        return self.finish_backward(self.passes[microbatch])

    def weight_grad(self, microbatch: int) -> None:
        """W: weight gradients."""
        order = weight_grads_alone(self.letters, microbatch)
        self.execute(order, backward=self.passes.pop(microbatch))

    def execute(self, order: Order, forward: Pass | None = None, backward: Pass | None = None) -> None:
        """Execute an order without spans of its own: the pipeline records one span for the action."""
        execute(order, forward, backward, self.ticks, traced=False)

    def layers_for(self, extra: Mapping[str, Any]) -> Sequence[Layer]:
        """Return the layers that a forward with these further inputs runs: here all of them, and no such input.

        Raises:
            ValueError: inputs that no layer takes.
        """
        if extra:
            rule = f"the layers of stage {self.index} take x alone"
            raise ValueError(f"{rule}, got more inputs: {', '.join(map(str, extra))}")
        return self.layers

    def begin_forward(
        self,
        microbatch: int,
        inputs: Tensors,
        extra: Mapping[str, Any] | None = None,
        weight: float = 1,
        loss_fn: Loss | None = None,
    ) -> MicrobatchPass:
        """Begin the forward of a microbatch, which holds the stage's weights until `finish_forward`.

        Raises:
            ValueError: more than one input, which no layer takes; weights under ZeRO-3 in a stage that trains none.
        """
        if len(inputs) != 1:
            more = ", ".join([*map(str, extra or ()), *["a tensor"] * (len(inputs) - 1)])
            raise ValueError(f"the layers of stage {self.index} take x alone, got more inputs: {more or 'none at all'}")
        layers = self.layers_for(extra or {})
        self._hold()
        (x,) = inputs
        one = MicrobatchPass(layers, x, weight, Given(weight, extra or {}, loss_fn))
        if torch.is_grad_enabled():
            self.passes[microbatch] = one
        return one

    def finish_forward(self, one: MicrobatchPass, loss_fn: Loss | None, weight: float) -> ForwardResult:
        """Return the output and the layers' losses; on the last stage the loss, whose gradient starts the backward."""
        self._release()
        if loss_fn is None:
            return ForwardResult((one.output,), one.loss)
        if self._has_loss:
            one.dy = torch.ones_like(one.output)  # of the loss itself
            return ForwardResult((), one.output if one.loss is None else one.output + one.loss)
        y = one.output.detach().requires_grad_(torch.is_grad_enabled())
        loss = scaled(loss_fn(y), weight)
        if torch.is_grad_enabled():
            has_graph = loss.requires_grad  # not for weight 0
            one.dy = torch.autograd.grad(loss, [y])[0] if has_graph else torch.zeros_like(y)
        return ForwardResult((), loss.detach() if one.loss is None else loss.detach() + one.loss)

    def begin_backward(self, microbatch: int, grads: Sequence[Tensor]) -> MicrobatchPass:
        """Begin the backward of a microbatch with the gradient of its output; the weights are held until its end."""
        one = self.passes[microbatch]
        self._hold()
        if grads:
            (one.dy,) = grads
        return one

    def finish_backward(self, one: MicrobatchPass) -> Tensors:
        """Return the gradient of the input; nothing for token ids."""
        self._release()
        return () if one.dx is None else (one.dx,)

    def _hold(self) -> None:
        for owner in self._synchronizers():
            owner.hold(list(self.module.parameters()))

    def _release(self) -> None:
        for owner in self._synchronizers():
            owner.release(list(self.module.parameters()))

    def _synchronizers(self) -> list[Synchronizer]:
        """What sums the gradients of this stage; raises ValueError for weights that nothing here can gather."""
        parameters = list(self.module.parameters())
        found = list(dict.fromkeys(owner for each in parameters for owner in synchronizers_of(each)))
        if not found and any(is_absent(parameter) for parameter in parameters):
            raise ValueError(
                f"ZeRO-3 gathers the weights of a stage in pieces by those that it trains, and stage {self.index} "
                "trains none; use Ddp, Zero1 or Zero2, or a plain stage here"
            )
        return found


def overlapped_forward_backward(forward: ReadyAction, backward: ReadyAction) -> None:
    """Run an F&B pair of a pipeline runtime with its two halves overlapped.

    Stages may have different layers.  A stage that is not an `InterruptibleStage` runs as one piece, beside the other
    half's all-to-alls.

    Raises:
        InvalidOrder: both halves are of one microbatch.
    """
    up, down = _half(forward), _half(backward)
    order = one_f_one_b_overlap(
        up.letters, forward.action.microbatch, backward.action.microbatch, backward_layers=down.letters
    )
    if backward.action.kind != B:  # I: its weight gradients come later
        order = without_weight_grads(order)
    execute(order, up.begin(), down.begin(), up.ticks or down.ticks, traced=False)
    up.finish()
    down.finish()


def _half(ready: ReadyAction) -> "_InterruptibleHalf | _PlainHalf":
    return _InterruptibleHalf(ready) if isinstance(ready.stage, InterruptibleStage) else _PlainHalf(ready)


class _InterruptibleHalf:
    """One half of a pair, through a stage of interruptible layers."""

    def __init__(self, ready: ReadyAction) -> None:
        assert isinstance(ready.stage, InterruptibleStage), "see _half"
        self._ready, self._stage = ready, ready.stage
        self.letters, self.ticks = ready.stage.letters, ready.stage.ticks

    def begin(self) -> MicrobatchPass:
        ready, microbatch = self._ready, self._ready.action.microbatch
        if ready.action.kind == F:
            self._pass = self._stage.begin_forward(microbatch, ready.inputs, ready.extra, ready.weight, ready.loss_fn)
        else:
            self._pass = self._stage.begin_backward(microbatch, ready.inputs)
        return self._pass

    def finish(self) -> None:
        ready, microbatch = self._ready, self._ready.action.microbatch
        if ready.action.kind == F:
            ready.result, ready.loss = self._stage.finish_forward(self._pass, ready.loss_fn, ready.weight)
            return
        ready.result = self._stage.finish_backward(self._pass)
        if ready.action.kind == B:
            del self._stage.passes[microbatch]


class _PlainHalf:
    """One half of a pair, through a stage that cannot be interrupted: it runs where P_F or P_B stands."""

    letters, ticks = (PLAIN,), None

    def __init__(self, ready: ReadyAction) -> None:
        self._ready = ready

    def begin(self) -> "_PlainHalf":
        return self

    def run(self, op: Op) -> None:
        if not op.kind.endswith("_W"):  # B has computed the weight gradients
            self._ready.run()

    def wait(self, op: Op) -> None:
        raise AssertionError(f"{op}: a layer in one piece launches no all-to-all")

    def finish(self) -> None:
        assert self._ready.result is not None, "the order contains P_F or P_B"


class V3Stage(Protocol):
    """What is needed of a stage of a V3-style model; those of `models.build_stages` have it.

    Attributes:
        config: sizes of the full model, with the coefficient `balance`.
        embedding, norm, head: None where another stage has them.
        layers: modules with `attention_norm`, `attention`, `mlp_norm`, `mlp`, `tp`, and `balance`, which returns the
            loss per sequence of a routing; an `mlp` with experts is an `MoE`.
        num_sequences: of the step, over all ranks; None for those of the microbatch.
        loss_chunk: tokens whose logits exist at the same time in the loss; None for all.
        recompute: keep only the input of each layer, and rerun its forward in the backward.
    """

    config: Any
    embedding: nn.Module | None
    layers: nn.ModuleList
    norm: nn.Module | None
    head: nn.Module | None
    num_sequences: int | None
    loss_chunk: int | None
    recompute: bool

    def enter(self, x: Tensor) -> Tensor:
        """Return the embedding of the ids."""

    def leave(self, x: Tensor) -> Tensor:
        """Return the logits."""

    def positions(self, device: Any) -> Tensor | None:
        """Return the positions of this rank's tokens in their sequence; None for 0, 1, 2 ..."""


def interruptible_stage(
    module: V3Stage,
    index: int,
    ticks: Ticks | None = None,
    fill: bool = True,
    fixed: Tensor | None = None,
) -> InterruptibleStage:
    """Return a stage of a V3-style model for `overlapped_forward_backward`; it shares the module's parameters.

    Args:
        module: a stage of `models.build_stages`.
        index: its number.
        ticks: as for `InterruptibleStage`.
        fill: as for `InterruptibleStage`.
        fixed: `experts_TK` of every microbatch, as for `InterruptibleLayer`; all ranks call this then.

    Raises:
        ValueError: experts that are dispatched node by node: their two exchanges per layer are one operation here.
    """
    assert isinstance(module, nn.Module), "a stage is a module"
    layers = list(_layers(module, fixed))
    if hasattr(module, "multi_token"):
        return SecondTokenStage(index, module, layers, ticks, fill, fixed)
    if module.embedding is not None:
        layers.insert(0, PlainLayer(module.enter))
    if module.head is None:
        return InterruptibleStage(index, layers, ticks, fill, module)
    if module.loss_chunk is None:
        return InterruptibleStage(index, [*layers, PlainLayer(module.leave)], ticks, fill, module)
    return InterruptibleStage(index, [*layers, _scoring(module.leave)], ticks, fill, module, has_loss=True)


def _scoring(leave: Callable[[Tensor], Tensor]) -> LinkedLayer:
    """Return a last layer whose output is the loss of a stage's output, or that output where no loss is wanted."""
    return LinkedLayer(lambda x, _, given: Linked(given.loss_of(leave(x))))


def _layers(stage: V3Stage, fixed: Tensor | None) -> Iterable[Layer]:
    for name, layer in stage.layers.named_children():
        if isinstance(layer.mlp, MoE):
            yield _routed(stage, name, layer, fixed)
        else:
            yield PlainLayer(partial(_run_dense, stage, layer))


def _routed(stage: V3Stage, name: str, layer: nn.Module, fixed: Tensor | None) -> "InterruptibleV3Layer":
    if getattr(layer.mlp, "nodes", None) is not None:
        raise ValueError(f"layer {name} dispatches node by node, which cannot be interrupted; use num_nodes=1")
    return InterruptibleV3Layer(stage, layer, fixed)


def _run_dense(stage: V3Stage, layer: nn.Module, x: Tensor) -> Tensor:
    inputs = x, stage.positions(x.device)
    y, _ = recompute(layer, *inputs) if stage.recompute else layer(*inputs)
    output: Tensor = y
    return output


class InterruptibleV3Layer(RoutedLayer):
    """A V3 layer with experts, as pieces; the parameters stay those of the layer.

    Args:
        stage: the stage that the layer is in.
        layer: the layer.
        fixed: as for `InterruptibleLayer`.
    """

    def __init__(self, stage: V3Stage, layer: nn.Module, fixed: Tensor | None = None) -> None:
        self._stage, self._layer = stage, layer
        assert isinstance(layer.mlp, MoE), "see _layers"
        self.experts, self.shared = layer.mlp.experts, layer.mlp.shared
        self.letters = ROUTED if self.shared is None else SHARED
        if fixed is not None:
            self.fix_routes(layer.mlp.router, fixed)

    def route(self, x: Tensor) -> Routed:
        """Compute A: attention, norm and router of `x_BSD`, and the balance loss per sequence."""
        routed: Routed = recompute(self._route, x) if self._stage.recompute else self._route(x)
        return routed

    def add(self, a: Tensor, y: Tensor) -> Tensor:
        """Return the output `y_BSD`, given `a_BSD` and the results `y_TD` for all tokens of the tp group."""
        y = y.view(len(a), -1, a.shape[-1])
        return a + (local_slice(y, TOKENS, self._layer.tp.group) if self._layer.tp.sequence_parallel else y)

    def grad_of_results(self, dy: Tensor) -> Tensor:
        """Return the gradient of the results, `dy_TD`; under sequence parallelism, gather it from the ranks of tp."""
        return gather_output_grad(dy, self._layer.tp).flatten(0, -2)

    def _route(self, x: Tensor) -> Routed:
        layer, stage = self._layer, self._stage
        a = x + layer.attention(layer.attention_norm(x), stage.positions(x.device))
        n = layer.mlp_norm(a)
        if layer.tp.sequence_parallel:  # a router needs full sequences, so all ranks of tp route all tokens
            n = gather_from_ranks(n, TOKENS, layer.tp.group)
        routing = layer.mlp.router(n.flatten(0, -2))
        loss = layer.balance(routing, n.shape[1], stage.num_sequences)
        return Routed(a, n.flatten(0, -2), routing, None if loss is None else stage.config.balance * loss)


class SecondTokenStage(InterruptibleStage):
    """The last stage of a model that predicts a second token, in pieces; in evaluation without it.

    Args:
        index: the number of the stage.
        module: a `MultiTokenStage`.
        layers: of the stage, between embedding and head.
        ticks, fill, fixed: as in `interruptible_stage`.
    """

    def __init__(
        self,
        index: int,
        module: Any,
        layers: Sequence[Layer],
        ticks: Ticks | None = None,
        fill: bool = True,
        fixed: Tensor | None = None,
    ) -> None:
        self._model = module
        extra = _routed(module, "of the second token", module.multi_token.layer, fixed)
        is_first = module.embedding is not None
        enter = [LinkedLayer(self._enter, keeps="embedded")] if is_first else []
        combine = LinkedLayer(self._combine, keeps="hidden", takes="embedded" if is_first else None)
        score = LinkedLayer(self._score, takes="hidden")
        super().__init__(index, [*enter, *layers, combine, extra, score], ticks, fill, module, has_loss=True)
        self._without = [*([PlainLayer(module.enter)] if is_first else []), *layers, _scoring(module.answer)]

    def layers_for(self, extra: Mapping[str, Any]) -> Sequence[Layer]:
        """Return all layers; in evaluation without the next tokens those of the model itself.

        Raises:
            ValueError: no next tokens in training, or other inputs.
        """
        if not extra:
            self._model.check_evaluation()
            return self._without
        if extra.keys() != {"next_ids", "next_targets"}:
            raise ValueError(f"stage {self.index} takes next_ids and next_targets beside x, got {', '.join(extra)}")
        return self.layers

    def _enter(self, x: Tensor, _: Tensor | None, given: Given) -> Linked:
        """Embed the ids, and the next ones: the table is used in one piece."""
        return Linked(self._model.enter(x), self._model.embedding(given.extra["next_ids"]))

    def _combine(self, x: Tensor, embedded: Tensor | None, given: Given) -> Linked:
        """Return the extra layer's input, and keep the hidden state for the head."""
        after = given.extra["next_ids"] if embedded is None else embedded
        return Linked(self._model.run(self._model.multi_token.combine, x, after), x.view_as(x))

    def _score(self, x: Tensor, hidden: Tensor | None, given: Given) -> Linked:
        """Return the sum of both losses: of the hidden state, and of the extra layer's output x."""
        assert hidden is not None, "kept by _combine"
        model, loss_fn = self._model, given.loss_fn
        output = model.answer(hidden)
        if loss_fn is None:
            return Linked(output)
        second = model.weighted_loss(model.multi_token.norm(x), given.extra["next_targets"])
        return Linked(scaled(loss_fn(output) + second, given.weight))
