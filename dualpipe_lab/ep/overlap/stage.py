"""Pipeline stages of overlappable layers, and the hook with which a pipeline runtime overlaps F&B pairs.

Chapter: book/ep/one-f-one-b-overlap.  In: a program with pairs, such as DualPipe's; layers, or a stage of
`models.build_stages`.  Out: the gradients of the runtime without overlap.
Elsewhere: DualPipe's `overlapped_forward_backward(module0, inputs0, criterion0, ...)`, which its user writes; Megatron
`build_transformer_layer_callables` in fine_grained_callables.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dualpipe_lab.dp.flat_parameter import is_absent
from dualpipe_lab.ep.moe import MoE
from dualpipe_lab.ep.overlap.executor import (
    Layer,
    MicrobatchContext,
    MicrobatchPass,
    Named,
    OverlappableLayer,
    Piece,
    PlainLayer,
    Routed,
    execute,
)
from dualpipe_lab.ep.overlap.order import (
    PLAIN,
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
from dualpipe_lab.pp.program import Action, B, F, I, W
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
        layers: Sequence[Layer],
        ticks: Ticks | None = None,
        module: nn.Module | None = None,
        has_loss: bool = False,
    ) -> None:
        modules = [layer for layer in layers if isinstance(layer, nn.Module)]
        super().__init__(index, nn.ModuleList(modules) if module is None else module)
        self.layers, self.ticks = list(layers), ticks
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
        loss_of = None if loss_fn is None else lambda _, output: loss_fn(output)
        ready = ReadyAction(self, Action(self.index, F, microbatch), inputs, extra or {}, loss_of, weight=weight)
        return ForwardResult(self._run_alone(ready, forward_alone), ready.loss)

    def backward(self, microbatch: int, grads: Sequence[Tensor]) -> Tensors:
        return self._run_alone(ReadyAction(self, Action(self.index, B, microbatch), tuple(grads)), backward_alone)

    def input_grad(self, microbatch: int, grads: Sequence[Tensor]) -> Tensors:
        return self._run_alone(ReadyAction(self, Action(self.index, I, microbatch), tuple(grads)), input_grads_alone)

    def weight_grad(self, microbatch: int) -> None:
        self._run_alone(ReadyAction(self, Action(self.index, W, microbatch)), weight_grads_alone)

    def _run_alone(self, ready: ReadyAction, build: Callable[[Sequence[str], int], Order]) -> Tensors:
        with self.running(ready) as one:
            up, down = (one, None) if ready.action.kind == F else (None, one)
            execute(build(one.letters, ready.action.microbatch), up, down, self.ticks, traced=False)
        assert ready.result is not None, "`running` has set it"
        return ready.result

    @contextmanager
    def running(self, ready: ReadyAction) -> Iterator[MicrobatchPass]:
        """Give the microbatch of an action for an order, and set the action's result; the weights are held meanwhile.

        Raises:
            ValueError: more than one input, which no layer takes; weights under ZeRO-3 in a stage that trains none.
        """
        _, kind, microbatch = ready.action
        layers = self._layers_of(ready) if kind == F else []
        owners = [] if kind == W else self._synchronizers()
        for owner in owners:
            owner.hold(list(self.module.parameters()))
        if kind == F:
            one = MicrobatchPass(layers, ready.inputs[0], MicrobatchContext(ready.weight, ready.extra, ready.loss_fn))
            if torch.is_grad_enabled():
                self.passes[microbatch] = one
        else:
            one = self.passes[microbatch]
            if ready.inputs:
                (one.dy,) = ready.inputs
        yield one
        for owner in owners:
            owner.release(list(self.module.parameters()))
        if kind in (B, W):
            del self.passes[microbatch]
        if kind == F and ready.loss_of is not None:  # the last stage
            if not self.takes_loss_weights:
                one.run_loss()
            ready.result, ready.loss = (), one.loss
        elif kind == F:
            ready.result, ready.loss = (one.output,), one.loss
        else:
            ready.result = () if one.dx is None else (one.dx,)

    def _layers_of(self, ready: ReadyAction) -> Sequence[Layer]:
        if len(ready.inputs) != 1:
            more = ", ".join([*map(str, ready.extra), *["a tensor"] * (len(ready.inputs) - 1)])
            rule = f"the layers of stage {self.index} take x alone"
            raise ValueError(f"{rule}, got more inputs: {more or 'none at all'}")
        return self.layers_for(ready.extra)

    def layers_for(self, extra: Mapping[str, Any]) -> Sequence[Layer]:
        """Return the layers that a forward with these further inputs runs; ValueError if no layer takes them."""
        if more := extra.keys() - {"padding"}:
            rule = f"the layers of stage {self.index} take x and padding alone"
            raise ValueError(f"{rule}, got more inputs: {', '.join(sorted(map(str, more)))}")
        return self.layers

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
    with _running(forward) as up, _running(backward) as down:
        execute(order, up, down, ticks, traced=False)


def _running(ready: ReadyAction) -> AbstractContextManager[MicrobatchPass]:
    if isinstance(ready.stage, OverlappableStage):
        return ready.stage.running(ready)
    return nullcontext(MicrobatchPass([_WholeStage(ready)], None))


class _WholeStage:
    """A stage that cannot be interrupted, as one layer: its F runs where P_F stands, its B where P_B does."""

    letters = PLAIN

    def __init__(self, ready: ReadyAction) -> None:
        self._ready = ready

    def begin(self, given: MicrobatchContext) -> dict[str, Piece]:
        return {"P": Piece(lambda _: self._ready.run(), lambda _: self._ready.run())}


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
    layers: list[Layer] = [
        _routed(module, name, layer, fixed) if isinstance(layer.mlp, MoE) else _dense(module, layer)
        for name, layer in module.layers.named_children()
    ]
    if hasattr(module, "mtp"):
        return OverlappableMTPStage(index, module, layers, ticks, fixed)
    if module.embedding is not None:
        layers.insert(0, PlainLayer(lambda _, x: {"x": module.enter(x)}))
    has_loss = module.head is not None and module.loss_chunk is not None
    if has_loss:
        layers.append(PlainLayer(lambda given, x: given.score(module.leave(x))))
    elif module.head is not None:
        layers.append(PlainLayer(lambda _, x: {"x": module.leave(x)}))
    return OverlappableStage(index, layers, ticks, module, has_loss)


def _routed(stage: Any, name: str, layer: Any, fixed: Tensor | None) -> "OverlappableV3Layer":
    if getattr(layer.mlp, "nodes", None) is not None:
        raise ValueError(f"layer {name} dispatches node by node, which cannot be interrupted; use num_nodes=1")
    return OverlappableV3Layer(stage, layer, fixed)


def _dense(stage: Any, layer: nn.Module) -> PlainLayer:
    def run(_: MicrobatchContext, x: Tensor) -> Named:
        inputs = x, stage.positions(x.device)
        return {"x": (recompute(layer, *inputs) if stage.recompute else layer(*inputs))[0]}

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
        layers: Sequence[Layer],
        ticks: Ticks | None,
        fixed: Tensor | None,
    ) -> None:
        is_first, second = model.embedding is not None, model.mtp

        def enter(given: MicrobatchContext, x: Tensor) -> Named:
            # the table is used in one piece
            return {"x": model.enter(x), "embedded": model.embedding(given.extra["next_ids"])}

        def combine(given: MicrobatchContext, x: Tensor, embedded: Tensor | None = None) -> Named:
            after = given.extra["next_ids"] if embedded is None else embedded
            return {"x": model.run(second.combine, x, after), "hidden": x.view_as(x)}

        def score(given: MicrobatchContext, x: Tensor, hidden: Tensor) -> Named:
            output: Tensor = model.answer(hidden)
            if given.loss_fn is None:
                return {"x": output}
            loss = model.weighted_loss(second.norm(x), given.extra["next_targets"])
            return {"loss": scaled(given.loss_fn(output) + loss, given.weight, [output])}

        # one P for both losses, so that the head is used in one piece
        extra, last = _routed(model, "of the second token", second.layer, fixed), PlainLayer(score, ("x", "hidden"))
        between = PlainLayer(combine, ("x", "embedded") if is_first else ("x",))
        first = [PlainLayer(enter)] if is_first else []
        super().__init__(index, [*first, *layers, between, extra, last], ticks, model, has_loss=True)
        first = [PlainLayer(lambda _, x: {"x": model.enter(x)})] if is_first else []
        answer = PlainLayer(lambda given, x: given.score(model.answer(x)))
        self._model, self._without = model, [*first, *layers, answer]

    def layers_for(self, extra: Mapping[str, Any]) -> Sequence[Layer]:
        """Return all layers; in evaluation without the next tokens those of the model itself."""
        names = [name for name in extra if name != "padding"]
        if not names:
            self._model.check_evaluation()
            return self._without
        if set(names) != {"next_ids", "next_targets"}:
            raise ValueError(f"stage {self.index} takes next_ids and next_targets beside x, got {', '.join(names)}")
        return self.layers
