"""`ExpertTable`: what a layer with experts keeps for the backward, tensor by tensor.

Chapter: book/ep/v3-moe.  In: as `LayerTable`, and how uneven the routing is.  Out: named bytes.
With t tokens that a rank routes, S = t k slots, R rows that its experts receive, f_e the width of an expert:
  router's input   t h b, of the shared expert too; gathered along tp by this library, whose ranks route all tokens
  router           the chosen scores and experts; of a loss per sequence its scores of all experts
  experts' rows    R h b, gate and up 2 R f_e b, and their product, where it is kept
  weighs           outputs: S h b, the outputs of all k experts, and S weights; products: R weights
  routes           order and inverse of slots and rows; nodes of this library hold them also where layers are recomputed
  shared expert    gate and up 2 T f_s b / tp, and their product, where it is kept
  overlap          recomputation repeats only what is before the exchanges: the layer's input, weights and routes
                   stay, the shared expert's input, and all that the experts keep
R is S on average, whatever ep is: a rank has fewer experts and receives the tokens of more ranks.  Here every rank of
ep sends as many tokens, so the fullest has `imbalance` S rows, at most min(k, E / ep) for each token of all ep ranks.
The library's own rules are proven by what autograd keeps, given the rows; along with them Megatron's are assumed.
Elsewhere: Megatron `TEGroupedMLP`, `MoEAlltoAllTokenDispatcher`; SimuMax's `moe_module`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.plan.fields import PlanFields
from dualpipe_lab.plan.kept_latent import LatentTable
from dualpipe_lab.plan.kept_tensors import Experts, KeepRules, KeptTensor, LayerTable
from dualpipe_lab.plan.rules import has_experts, has_second
from dualpipe_lab.plan.states import AnyModel

_INDEX = 8  # bytes of an index, as torch has them
_EXPERT_IN, _EXPERT_OUT = "expert in", "expert out"
EXPERTS = frozenset({_EXPERT_IN, _EXPERT_OUT})  # the names of their weights


@dataclass(frozen=True)
class ExpertTable(LatentTable):
    """What one rank keeps of a layer with experts, for one microbatch.

    Attributes:
        imbalance: rows of the fullest rank, divided by their mean.
        rows: that this rank receives, if they are known; None for those of the imbalance.

    >>> from dualpipe_lab.models import V3MoEConfig
    >>> from dualpipe_lab.plan import MEGATRON, Plan
    >>> config = V3MoEConfig(hidden_size=7168, expert_ffn_size=2048, num_experts=256, num_experts_per_token=8)
    >>> plan = Plan(dp=8, ep=8, experts_in_data=True, precision="bfloat16")
    >>> table, alone = (ExpertTable(config, one, MEGATRON, 1, 4096) for one in (plan, Plan(precision="bfloat16")))
    >>> table.num_received, table.layer_bytes == alone.layer_bytes
    (32768, True)
    """

    imbalance: float = 1.0
    rows: int | None = None

    @property
    def num_routed(self) -> int:
        """t, the tokens that this rank routes."""
        return self.num_tokens if self.rules.experts == "copied" else self.local_tokens

    @property
    def num_slots(self) -> int:
        """S, the copies of tokens that it sends."""
        return self.num_routed * self.sparse.num_experts_per_token

    @property
    def num_received(self) -> int:
        """R, the rows that its experts receive; of sharded experts those of all ranks of tp."""
        if self.rows is not None:
            return self.rows
        k, num_ranks = self.sparse.num_experts_per_token, self.plan.ep
        num_ranks *= self.plan.tp if self.rules.experts == "spread" else 1
        most = self.num_routed * num_ranks * min(k, self.sparse.num_experts // num_ranks)
        rows = min(ceil(self.num_slots * self.imbalance), most)
        return rows * self._width_shards

    @property
    def route_bytes(self) -> int:
        """Order and inverse of slots and rows, and the load of every expert."""
        return 2 * (self.num_slots + self.num_received) * _INDEX + self.sparse.num_experts * _INDEX

    @property
    def stored_bytes(self) -> int:
        """What the layer keeps from its forward to its backward: with recomputation its input, and its routes.

        Overlapped experts are not run again: what they keep stays too.
        """
        if self._repeats_part:
            shared = self.num_routed * self.hidden * self.element if self.sparse.num_shared_experts else 0
            return self.boundary_bytes + shared + self._exchanged_bytes
        routes = self.route_bytes if self.plan.recompute and self.rules.keeps_routes else 0
        return super().stored_bytes + routes

    @property
    def working_bytes(self) -> int:
        """What a backward takes: among the experts, or where overlapped ones are gone and what was before is run again.

        The gradients of attention are as large as its tensors, at most.
        """
        if not self._repeats_part:
            return super().working_bytes
        again = self.layer_bytes - self.stored_bytes
        gradients = self.boundary_bytes + sum(tensor.num_bytes for tensor in self.attention())
        return max(self.backward_bytes, again - self._exchanged_bytes + gradients)

    @property
    def _repeats_part(self) -> bool:
        """Whether recomputation stops before the exchanges."""
        return self.plan.recompute and self.plan.overlap

    @property
    def _exchanged_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.exchanged())

    @property
    def network_weights(self) -> dict[str, int]:
        """Elements of the weights of the network's products: of one expert, and of the shared one."""
        expert = self.hidden * self._width
        found = {_EXPERT_IN: 2 * expert, _EXPERT_OUT: expert}
        if self.sparse.num_shared_experts:
            shared = self.hidden * self.shard(self.sparse.shared_ffn_size)
            found |= {"shared in": 2 * shared, "shared out": shared}
        return found

    @property
    def backward_bytes(self) -> int:
        """What a layer's backward takes at most: among its experts, between their products."""
        rows, one = self.num_received, self.num_received * self._width
        again = 0 if self.rules.keeps_product else one
        outputs = self.num_slots * self.hidden if self.rules.weighs == "outputs" else 0
        numbers = self.local_tokens * self.hidden + outputs + rows * self.hidden + 3 * one + again
        if self.rules.weight_gradients == "one":  # the gradients of all experts here are computed in one call
            numbers += self.sparse.num_experts // self.plan.ep * self.sparse.expert_parameters // self._ranks_of_tp
        return numbers * self.element

    def network(self) -> Iterator[KeptTensor]:
        """Yield the tensors between the network's input and its output."""
        if self.num_routed > self.kept_tokens:
            yield KeptTensor(
                "router's input, gathered", (self.num_routed - self.kept_tokens) * self.hidden * self.element
            )
        yield from self.router()
        yield from self.exchanged()

    def exchanged(self) -> Iterator[KeptTensor]:
        """Yield what is kept from the router's choice on, behind which overlapped layers are not run again."""
        number = self.element if self.rules.weighs == "outputs" else max(4, self.element)
        slots = self.num_slots if self.rules.weighs == "outputs" else self.num_received
        yield KeptTensor("weights", slots * number)
        yield KeptTensor("routes", self.route_bytes)
        rows, width = self.num_received, self._width
        yield KeptTensor("experts' rows", rows * self.hidden * self.element)
        yield KeptTensor("experts' gate and up", 2 * rows * width * self.element)
        if self.rules.keeps_product:
            yield KeptTensor("experts' product", rows * width * self.element)
        if self.rules.weighs == "outputs":
            yield KeptTensor("experts' outputs", self.num_slots * self.hidden * self.element)
        yield from self.shared_expert()

    def router(self) -> Iterator[KeptTensor]:
        """Yield what the router and its loss keep."""
        config = self.sparse
        number = self.element if self.rules.weighs == "outputs" else max(4, self.element)
        slots, scores = self.num_slots, self.num_routed * config.num_experts
        if config.normalise or config.scoring == "sigmoid":
            slopes = config.normalise and config.scoring == "sigmoid"
            yield KeptTensor("chosen scores", slots * number * (2 if slopes else 1))
        else:
            yield KeptTensor("scores", scores * number)
        yield KeptTensor("chosen experts", slots * _INDEX)
        if config.balance:
            yield KeptTensor("balance loss", scores * number * (3 if config.scoring == "sigmoid" else 2))

    def shared_expert(self) -> Iterator[KeptTensor]:
        """Yield what the shared expert keeps, besides the router's input."""
        inner = self.num_tokens * self.shard(self.sparse.shared_ffn_size) * self.element
        if inner:
            yield KeptTensor("shared gate and up", 2 * inner)
            if self.rules.keeps_product:
                yield KeptTensor("shared product", inner)

    @property
    def _ranks_of_tp(self) -> int:
        """The ranks of tp that share the experts of one place along ep."""
        return 1 if self.rules.experts == "copied" else self.plan.tp

    @property
    def _width_shards(self) -> int:
        return self.plan.tp if self.rules.experts == "sharded" else 1

    @property
    def _width(self) -> int:
        """Features of an expert on this rank."""
        return self.sparse.expert_ffn_size // self._width_shards


class Tables(NamedTuple):
    """The tables of a model's layers on one rank: of dense ones, and of those from `first_sparse` on."""

    dense: LayerTable
    sparse: LayerTable
    first_sparse: int

    @classmethod
    def of(
        cls,
        model: AnyModel,
        plan: PlanFields,
        rules: KeepRules,
        num_rows: int,
        length: int,
        tp_rank: int = 0,
        imbalance: float = 1.0,
    ) -> "Tables":
        """Return those of a model; the arguments are those of `ExpertTable`."""
        how = model, plan, rules, num_rows, length, tp_rank
        if not isinstance(model, V3MoEConfig):
            return cls(LayerTable(*how), LayerTable(*how), 0)
        return cls(LatentTable(*how), ExpertTable(*how, imbalance), model.num_dense_layers)

    def layer(self, number: int) -> LayerTable:
        """Return the table of the layer with this number."""
        return self.sparse if number >= self.first_sparse else self.dense

    def of_layers(self, numbers: Sequence[int]) -> list[LayerTable]:
        """Return the tables of ascending layers, each once."""
        ends = [self.layer(number) for number in (*numbers[:1], *numbers[-1:])]
        return ends if len(ends) == 2 and ends[0] is not ends[1] else ends[:1]


def held_model(model: AnyModel, plan: PlanFields, experts: Experts) -> AnyModel:
    """Return the model whose states a rank holds where the ranks of tp share out (`spread`) or shard the experts.

    Of both it has narrower experts, which have the same bytes, and routers for as many.

    Raises:
        ValueError: experts that do not divide among the ranks of tp.
    """
    if not isinstance(model, V3MoEConfig) or experts == "copied" or plan.tp == 1:
        return model
    if not has_experts(model) and not has_second(plan, model):  # the second token's layer has experts
        return model
    shared_out = {"the experts of a rank of ep": model.num_experts // plan.ep} if experts == "spread" else {}
    for what, number in (shared_out | {"the features of an expert": model.expert_ffn_size}).items():
        if number % plan.tp:
            raise ValueError(
                f"{what} divide among the ranks of tp, got {number} for tp {plan.tp}; use another ep or tp"
            )
    width, shared = model.expert_ffn_size // plan.tp, model.num_shared_experts * plan.tp  # of the same total width
    return replace(model, expert_ffn_size=width, num_shared_experts=shared)
