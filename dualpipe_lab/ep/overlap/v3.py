"""`interruptible_stage`: a stage of a V3-style model, embedding and head included, as a stage that can be interrupted.

Chapter: book/ep/one-f-one-b-overlap.  In: a stage of `models.build_stages`.  Out: an `InterruptibleStage` for the
pipeline runtime, which trains the same parameters under the same names.
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
Elsewhere: Megatron `build_transformer_layer_callables` in fine_grained_callables.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from dualpipe_lab.ep.moe import MoE, Routes
from dualpipe_lab.ep.overlap.executor import Layer
from dualpipe_lab.ep.overlap.layer import LayerPass, Routed, fix_routes, plan
from dualpipe_lab.ep.overlap.linked import Given, Linked, LinkedLayer
from dualpipe_lab.ep.overlap.order import ROUTED, SHARED, Ticks
from dualpipe_lab.ep.overlap.plain import PlainLayer
from dualpipe_lab.ep.overlap.stage import InterruptibleStage
from dualpipe_lab.pp.runtime.recompute import recompute
from dualpipe_lab.pp.runtime.stage import scaled
from dualpipe_lab.tp.mappings import TOKENS, gather_from_ranks, gather_output_grad, local_slice


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


class InterruptibleV3Layer:
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
        self._routes = None if fixed is None else fix_routes(layer.mlp.router, self.experts, fixed)

    def begin(self, weight: float = 1, given: Given | None = None) -> LayerPass:
        """Return the pass of one microbatch through this layer."""
        return LayerPass(self, weight)

    def route(self, x: Tensor) -> Routed:
        """Compute A: attention, norm and router of `x_BSD`, and the balance loss per sequence."""
        routed: Routed = recompute(self._route, x) if self._stage.recompute else self._route(x)
        return routed

    def routes_of(self, experts: Tensor) -> Routes:
        """Return the routes of a microbatch; its ranks exchange counts unless they are fixed."""
        return plan(self.experts, experts) if self._routes is None else self._routes

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
