"""Pipeline stages of overlappable layers, and the hook with which a pipeline runtime overlaps F&B pairs.

Chapter: book/ep/one-f-one-b-overlap.  In: a program with pairs, such as DualPipe's; layers, or a stage of
`models.build_stages`.  Out: the gradients of the runtime without overlap.
Elsewhere: DualPipe's `overlapped_forward_backward(module0, inputs0, criterion0, ...)`, which its user writes; Megatron
`build_transformer_layer_callables` in fine_grained_callables.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dualpipe_lab.dp.flat_parameter import is_absent
from dualpipe_lab.ep.moe import MoE
from dualpipe_lab.ep.overlap.executor import (
    MicrobatchContext,
    MicrobatchPass,
    OverlappableLayer,
    Pass,
    PlainLayer,
    Routed,
    execute,
)
from dualpipe_lab.ep.overlap.order import (
    PLAIN,
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
from dualpipe_lab.ep.router import kept_positions, leave_out
from dualpipe_lab.grad_ready import Synchronizer, synchronizers_of
from dualpipe_lab.pp.program import B, F
from dualpipe_lab.pp.runtime.recompute import recompute
from dualpipe_lab.pp.runtime.stage import ForwardResult, Loss, ReadyAction, Stage, Tensors, scaled
from dualpipe_lab.tp.mappings import TOKENS, gather_from_ranks, gather_output_grad, local_slice


class OverlappableStage(Stage):
    """A pipeline stage of overlappable layers.

    The all-to-alls of an unpaired F or I are exposed, because there is no other work of the same microbatch; those of B
    are overlapped by its own weight gradients.

    Args:
        index: the number of the stage.
        layers: in the order of the forward; each is an `OverlappableLayer`, or a `PlainLayer` in one piece.
        ticks: nanoseconds of every kind of compute, as for `execute`.
        module: the module that the layers are made from, with all their parameters (default: a list of the layers).
        has_loss: whether the last layer computes the loss, because that has weights; its output's gradient is 1.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[OverlappableLayer | PlainLayer],
        ticks: Ticks | None = None,
        module: nn.Module | None = None,
        has_loss: bool = False,
    ) -> None:
        modules = [layer for layer in layers if isinstance(layer, nn.Module)]
        super().__init__(index, nn.ModuleList(modules) if module is None else module)
        self.layers, self.ticks, self._has_loss = list(layers), ticks, has_loss
        self.takes_loss_weights = has_loss
        self.letters = [layer.letters for layer in layers]
        self.passes: dict[int, MicrobatchPass] = {}

    @property
    def num_live(self) -> int:
        return len(self.passes)

    def forward(
        self,
        microbatch: int,
        inputs: Tensors,
        extra: Mapping[str, Any] | None = None,
        loss_fn: Loss | None = None,
        weight: float = 1,
    ) -> ForwardResult:
        one = self.begin_forward(microbatch, inputs, extra, weight, loss_fn)
        self.execute(forward_alone(one.letters, microbatch), forward=one)
        return self.finish_forward(one)

    def backward(self, microbatch: int, grads: Sequence[Tensor]) -> Tensors:
        order = backward_alone(self.letters, microbatch)
        self.execute(order, backward=self.begin_backward(microbatch, grads))
        return self.finish_backward(self.passes.pop(microbatch))

    def input_grad(self, microbatch: int, grads: Sequence[Tensor]) -> Tensors:
        """I: input gradients; the tensors that W needs are kept."""
        order = input_grads_alone(self.letters, microbatch)
        self.execute(order, backward=self.begin_backward(microbatch, grads))
        return self.finish_backward(self.passes[microbatch])

    def weight_grad(self, microbatch: int) -> None:
        order = weight_grads_alone(self.letters, microbatch)
        self.execute(order, backward=self.passes.pop(microbatch))

    def execute(self, order: Order, forward: Pass | None = None, backward: Pass | None = None) -> None:
        """Execute an order without spans of its own: the pipeline records one span for the action."""
        execute(order, forward, backward, self.ticks, traced=False)

    def layers_for(self, extra: Mapping[str, Any]) -> Sequence[OverlappableLayer | PlainLayer]:
        """Return the layers that a forward with these further inputs runs; ValueError if no layer takes them."""
        if more := extra.keys() - {"padding"}:
            rule = f"the layers of stage {self.index} take x and padding alone"
            raise ValueError(f"{rule}, got more inputs: {', '.join(sorted(map(str, more)))}")
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
        one = MicrobatchPass(layers, inputs[0], MicrobatchContext(weight, extra or {}, loss_fn))
        if torch.is_grad_enabled():
            self.passes[microbatch] = one
        return one

    def finish_forward(self, one: MicrobatchPass) -> ForwardResult:
        """Return the output and the layers' losses; on the last stage the loss, whose gradient starts the backward."""
        self._release()
        if one.given.loss_fn is None:
            return ForwardResult((one.output,), one.loss)
        if self._has_loss:
            loss, one.dy = one.output, torch.ones_like(one.output)
        else:
            y = one.output.detach().requires_grad_(torch.is_grad_enabled())
            loss = one.given.loss_of(y)
            if loss.requires_grad:
                (one.dy,) = torch.autograd.grad(loss, [y])
            elif torch.is_grad_enabled():  # weight 0
                one.dy = torch.zeros_like(y)
        return ForwardResult((), loss.detach() if one.loss is None else loss.detach() + one.loss)

    def begin_backward(self, microbatch: int, grads: Sequence[Tensor]) -> MicrobatchPass:
        """Begin the backward of a microbatch with the gradient of its output; the weights are held until its end."""
        one = self.passes[microbatch]
        self._hold()
        if grads:
            (one.dy,) = grads
        return one

    def finish_backward(self, one: MicrobatchPass) -> Tensors:
        self._release()
        return () if one.dx is None else (one.dx,)

    def _hold(self) -> None:
        for owner in self._synchronizers():
            owner.hold(list(self.module.parameters()))

    def _release(self) -> None:
        for owner in self._synchronizers():
            owner.release(list(self.module.parameters()))

    def _synchronizers(self) -> list[Synchronizer]:
        parameters = list(self.module.parameters())
        found = list(dict.fromkeys(owner for each in parameters for owner in synchronizers_of(each)))
        if not found and any(is_absent(parameter) for parameter in parameters):
            raise ValueError(
                f"ZeRO-3 gathers the weights of a stage in pieces by those that it trains, and stage {self.index} "
                "trains none; use DDP, Zero1 or Zero2, or a plain stage here"
            )
        return found


def overlapped_forward_backward(forward: ReadyAction, backward: ReadyAction) -> None:
    """Run an F&B pair of a pipeline runtime with its two halves overlapped.

    Stages may have different layers.  A stage that is not an `OverlappableStage` runs as one piece, beside the other
    half's all-to-alls.

    Raises:
        InvalidOrder: both halves are of one microbatch.
    """
    letters = [getattr(ready.stage, "letters", (PLAIN,)) for ready in (forward, backward)]
    order = one_f_one_b_overlap(
        letters[0], forward.action.microbatch, backward.action.microbatch, backward_layers=letters[1]
    )
    if backward.action.kind != B:  # I: its weight gradients come later
        order = without_weight_grads(order)
    ticks = getattr(forward.stage, "ticks", None) or getattr(backward.stage, "ticks", None)
    up, down = _begin(forward), _begin(backward)
    execute(order, up, down, ticks, traced=False)
    _finish(forward, up)
    _finish(backward, down)


class _WholeStage:
    """One half of a pair, through a stage that cannot be interrupted: it runs where P_F or P_B stands."""

    def __init__(self, ready: ReadyAction) -> None:
        self._ready = ready

    def run(self, op: Op) -> None:
        if not op.kind.endswith("_W"):  # B has computed the weight gradients
            self._ready.run()

    def wait(self, op: Op) -> None:
        raise AssertionError(f"{op}: a layer in one piece launches no all-to-all")


def _begin(ready: ReadyAction) -> Pass:
    stage, microbatch = ready.stage, ready.action.microbatch
    if not isinstance(stage, OverlappableStage):
        return _WholeStage(ready)
    if ready.action.kind == F:
        return stage.begin_forward(microbatch, ready.inputs, ready.extra, ready.weight, ready.loss_fn)
    return stage.begin_backward(microbatch, ready.inputs)


def _finish(ready: ReadyAction, one: Pass) -> None:
    stage = ready.stage
    if not isinstance(stage, OverlappableStage):
        return
    assert isinstance(one, MicrobatchPass), "see _begin"
    if ready.action.kind == F:
        ready.result, ready.loss = stage.finish_forward(one)
        return
    ready.result = stage.finish_backward(one)
    if ready.action.kind == B:
        del stage.passes[ready.action.microbatch]


def overlappable_stage(
    module: Any,
    index: int,
    ticks: Ticks | None = None,
    fixed: Tensor | None = None,
) -> OverlappableStage:
    """Return a stage of a V3-style model for `overlapped_forward_backward`; it shares the module's parameters.

    Layers without experts are a P each: embedding, dense layer, norm and head.  The loss follows, or is a part of the
    last P where the loss has weights: in chunks, and with a second token.

    Args:
        module: a stage of `models.build_stages` of a `V3MoEConfig`.
        index: its number.
        ticks: as for `OverlappableStage`.
        fixed: `experts_TK` of every microbatch, as for `OverlappableLayer`; all ranks call this then.

    Raises:
        ValueError: experts that are dispatched node by node: their two exchanges per layer are one operation here.
    """
    layers: list[OverlappableLayer | PlainLayer] = [
        _routed(module, name, layer, fixed) if isinstance(layer.mlp, MoE) else _dense(module, layer)
        for name, layer in module.layers.named_children()
    ]
    if hasattr(module, "mtp"):
        return OverlappableMTPStage(index, module, layers, ticks, fixed)
    if module.embedding is not None:
        layers.insert(0, PlainLayer(lambda x, _: module.enter(x)))
    has_loss = module.head is not None and module.loss_chunk is not None
    if has_loss:
        layers.append(PlainLayer(lambda x, given: given.loss_of(module.leave(x))))
    elif module.head is not None:
        layers.append(PlainLayer(lambda x, _: module.leave(x)))
    return OverlappableStage(index, layers, ticks, module, has_loss)


def _routed(stage: Any, name: str, layer: Any, fixed: Tensor | None) -> "OverlappableV3Layer":
    if getattr(layer.mlp, "nodes", None) is not None:
        raise ValueError(f"layer {name} dispatches node by node, which cannot be interrupted; use num_nodes=1")
    return OverlappableV3Layer(stage, layer, fixed)


def _dense(stage: Any, layer: nn.Module) -> PlainLayer:
    def run(x: Tensor, _: MicrobatchContext) -> Tensor:
        inputs = x, stage.positions(x.device)
        y: Tensor = (recompute(layer, *inputs) if stage.recompute else layer(*inputs))[0]
        return y

    return PlainLayer(run)


class OverlappableV3Layer(OverlappableLayer):
    """A V3 layer with experts, as pieces; the parameters stay those of the layer.

    Attention and shared expert keep their own collectives, along tp and cp: they run inside of A and S, in the same
    order on every rank, because all execute one order.
    """

    def __init__(self, stage: Any, layer: Any, fixed: Tensor | None = None) -> None:
        super().__init__(layer.attention, layer.mlp.router, layer.mlp.experts, fixed, layer.mlp.shared)
        self.stage, self.layer = stage, layer

    def route(self, x: Tensor, padding: Tensor | None = None) -> Routed:
        inputs = x, padding
        routed: Routed = recompute(self._route, *inputs) if self.stage.recompute else self._route(*inputs)
        return routed

    def add(self, a: Tensor, y: Tensor) -> Tensor:
        """Return the output `y_BSD`, given `a_BSD` and the results `y_TD` for all tokens of the tp group."""
        y, tp = y.view(len(a), -1, a.shape[-1]), self.layer.tp
        return a + (local_slice(y, TOKENS, tp.group) if tp.sequence_parallel else y)

    def grad_of_results(self, dy: Tensor) -> Tensor:
        """Return the gradient of the results, `dy_TD`; under sequence parallelism, gather it from the ranks of tp."""
        return gather_output_grad(dy, self.layer.tp).flatten(0, -2)

    def _route(self, x: Tensor, padding: Tensor | None) -> Routed:
        layer, stage = self.layer, self.stage
        a = x + layer.attention(layer.attention_norm(x), stage.positions(x.device))
        n = layer.mlp_norm(a)
        if layer.tp.sequence_parallel:  # a router needs full sequences, so all ranks of tp route all tokens
            n = gather_from_ranks(n, TOKENS, layer.tp.group)
        rows, length = n.flatten(0, -2), n.shape[1]
        kept = kept_positions(padding, len(rows))
        tokens = leave_out(rows, kept)
        routing = layer.mlp.router(tokens)
        loss = layer.balance(routing, length, stage.num_sequences, padding)
        return Routed(a, tokens, routing, None if loss is None else stage.config.balance * loss, kept)


class OverlappableMTPStage(OverlappableStage):
    """The last stage of a model that predicts a second token, in pieces; in evaluation without it."""

    def __init__(
        self,
        index: int,
        model: Any,
        layers: Sequence[OverlappableLayer | PlainLayer],
        ticks: Ticks | None,
        fixed: Tensor | None,
    ) -> None:
        is_first, second = model.embedding is not None, model.mtp

        def enter(x: Tensor, given: MicrobatchContext) -> Tensor:
            y: Tensor = model.enter(x)
            given.tensors["embedded"] = model.embedding(given.extra["next_ids"])  # the table is used in one piece
            return y

        def combine(x: Tensor, given: MicrobatchContext) -> Tensor:
            after = given.tensors["embedded"] if is_first else given.extra["next_ids"]
            y: Tensor = model.run(second.combine, x, after)
            given.tensors["hidden"] = x.view_as(x)
            return y

        def score(x: Tensor, given: MicrobatchContext) -> Tensor:
            output: Tensor = model.answer(given.tensors["hidden"])
            if given.loss_fn is None:
                return output
            loss = model.weighted_loss(second.norm(x), given.extra["next_targets"])
            return scaled(given.loss_fn(output) + loss, given.weight, [output])

        first = [PlainLayer(enter, keeps="embedded")] if is_first else []
        between = PlainLayer(combine, keeps="hidden", takes="embedded" if is_first else None)
        # one P for both losses, so that the head is used in one piece
        extra, last = _routed(model, "of the second token", second.layer, fixed), PlainLayer(score, takes="hidden")
        super().__init__(index, [*first, *layers, between, extra, last], ticks, model, has_loss=True)
        first = [PlainLayer(lambda x, _: model.enter(x))] if is_first else []
        answer = PlainLayer(lambda x, given: given.loss_of(model.answer(x)))
        self._model, self._without = model, [*first, *layers, answer]

    def layers_for(self, extra: Mapping[str, Any]) -> Sequence[OverlappableLayer | PlainLayer]:
        """Return all layers; in evaluation without the next tokens those of the model itself."""
        names = [name for name in extra if name != "padding"]
        if not names:
            self._model.check_evaluation()
            return self._without
        if set(names) != {"next_ids", "next_targets"}:
            raise ValueError(f"stage {self.index} takes next_ids and next_targets beside x, got {', '.join(names)}")
        return self.layers
