"""The activations that a rank saves for the backward, tensor by tensor: of layers, the embedding and the head.

Chapter: book/tp/block, book/tp/latent-attention, book/ep/v3-moe, book/whole/two-tokens.
In: a model, a plan, the tokens of a microbatch.  Out: named bytes, as autograd keeps them in this library.
  tokens    T on the rank, between the layers T / tp of them under sequence parallelism
  experts   k T rows of a rank on average, whatever ep is: it has fewer experts and receives the tokens of more ranks
Elsewhere: Megatron `theoretical_memory_usage.py`; SimuMax's `get_activation_info`.
Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 4.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, TypeAlias

from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.parameters import layer_parameters
from dualpipe_lab.models.stage_rules import ModelConfig, sizes_of
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.plan.fields import PlanFields
from dualpipe_lab.plan.parameters import local_numel
from dualpipe_lab.sharding import shard_slice
from dualpipe_lab.tp.latent_sizes import LatentSizes

ID_BYTES = 16  # of a token, for the embedding's backward
_LOSS_BYTES = 8  # per logit, while the loss or its gradient is computed
_INDEX = 8  # of an expert or a row
# weights whose gradients are computed in one product
_TOGETHER = dict.fromkeys(("attention.k.weight", "attention.v.weight"), "attention.q.weight") | {
    "mlp.up.weight": "mlp.gate.weight"
}
SavedBytes: TypeAlias = dict[str, int]  # bytes of tensors by name, of one microbatch on one rank


class LayerTable:
    """What one rank keeps of each dense layer and of the ends, for `num_rows` sequences of `length` tokens there."""

    def __init__(self, model: ModelConfig, plan: PlanFields, num_rows: int, length: int, tp_rank: int = 0) -> None:
        self.model, self.plan, self.length, self.tp_rank, self.sizes = model, plan, length, tp_rank, sizes_of(model)
        self.latent = None if isinstance(model, LlamaConfig) else model.latent
        self.element = plan.element_bytes
        self.scale = max(4, self.element)  # bytes of a norm's scale, per token
        self.hidden, self.heads = self.sizes.hidden_size, self.sizes.num_heads // plan.tp
        self.kv_heads = max(self.sizes.num_kv_heads // plan.tp, 1)
        self.num_tokens = num_rows * length
        self.local_tokens = self.num_tokens // plan.tp if plan.sequence_parallel else self.num_tokens
        self.boundary_bytes = self.local_tokens * self.hidden * self.element  # what a stage sends to the next one
        self.inner = self.num_tokens * self.shard(self.sizes.ffn_size)
        tokens = self.num_tokens if plan.loss_chunk is None else min(plan.loss_chunk, self.num_tokens)
        self.num_logits = tokens * self.shard(self.sizes.vocabulary_size)
        self.loss_bytes = self.num_logits * _LOSS_BYTES  # while the loss or its gradient is computed
        # the gradient of logits, where a stage computes it in its forward; a loss in chunks has none
        self.output_grad_bytes = self.num_logits * self.element if plan.loss_chunk is None else 0

    @cached_property
    def layer_bytes(self) -> int:
        """What one layer keeps while its forward is not recomputed."""
        return sum(self.layer().values())

    @property
    def stored_bytes(self) -> int:
        """What one layer keeps from its forward to its backward: with recomputation its input alone."""
        return self.boundary_bytes if self.plan.recompute else self.layer_bytes

    @property
    def head_bytes(self) -> int:
        """What the head's backward takes: the gradients of logits and weight, the head's input and its gradient."""
        weight = self.shard(self.sizes.vocabulary_size) * self.hidden
        return (self.num_logits + weight + 2 * self.num_tokens * self.hidden) * self.element

    @cached_property
    def backward_bytes(self) -> int:
        """What a layer's backward takes at most: in its network, between the two or three products."""
        gradients = self.local_tokens * self.hidden + 4 * self.inner
        gathered = self.num_tokens * self.hidden if self.plan.sequence_parallel else 0
        return (gradients + gathered + max(self.weights())) * self.element

    @property
    def working_bytes(self) -> int:
        """What a layer's backward takes above what is stored of it: with recomputation all of the layer is back."""
        return self.backward_bytes + self.layer_bytes - self.stored_bytes

    def weights(self) -> list[int]:
        """Return the elements of the weights of a layer's products on this rank, in their order."""
        found = Counter[str]()
        for parameter in layer_parameters(self.model, has_experts=False):
            if len(parameter.shape) == 2:
                product = _TOGETHER.get(parameter.name, parameter.name)
                found[product] += local_numel(parameter, self.plan.tp, self.tp_rank, self.sizes.num_kv_heads)
        return list(found.values())

    def layer(self) -> SavedBytes:
        """Return the tensors of one layer, in the order of its forward."""
        norm = self.local_tokens * (self.hidden * self.element + self.scale)
        return {
            "attention norm's input": norm,
            "attention's input": self.boundary_bytes,  # under sequence parallelism the backward gathers it again
            **self.attention(),
            "network norm's input": norm,
            "network's input": self.boundary_bytes,
            **self.network(),
        }

    def attention(self) -> SavedBytes:
        """Return the tensors between attention's input and its output."""
        if self.latent is not None:
            return self._latent_attention(self.latent)
        # of softmax nothing: the backward computes it again
        per_head = self.num_tokens * self.sizes.size_of_head * self.element
        norms = (self.heads + self.kv_heads) * (per_head + self.num_tokens * self.scale)
        return {
            "norms of heads": norms if self.sizes.qk_norm else 0,
            "queries": self.heads * per_head,
            "keys and values": 2 * self.kv_heads * per_head,
            "angles": self.length * self.sizes.size_of_head * self.element,
            **self._output(self.heads * per_head, self.heads * per_head),
        }

    def _latent_attention(self, sizes: LatentSizes) -> SavedBytes:
        """Values are a view of what is unfolded, content of keys included.  A ring takes values of the size of keys."""
        tokens, each = self.local_tokens, self.heads * self.num_tokens * self.element
        travels = self.plan.cp > 1 and sizes.is_shorter(self.heads)
        pads = self.plan.cp > 1 and not travels
        kept = {}
        if sizes.query_rank is not None:
            kept["latent of queries"] = tokens * (sizes.query_rank * self.element + self.scale)
            kept["latent of queries, normalised"] = tokens * sizes.query_rank * self.element
        kept["latent of keys and values"] = tokens * (sizes.cached * self.element + self.scale)
        kept["queries"] = each * sizes.key
        if travels:
            kept["latents that travel"] = self.num_tokens * sizes.cached * self.element
        else:
            kept["latent, normalised"] = tokens * sizes.kv_rank * self.element
            kept["keys and values"] = each * (sizes.key + (sizes.key if pads else sizes.value + sizes.content))
        kept["angles"] = self.length * sizes.position * self.element
        return kept | self._output(each * sizes.value, each * (sizes.key if pads else sizes.value))

    def _output(self, num_bytes: int, before: int) -> SavedBytes:
        if self.plan.cp == 1:
            return {"attention's output": num_bytes}
        sums = self.heads * self.num_tokens * self.scale
        return {"log-sum-exp": sums, "output before the exchange": before, "attention's output": num_bytes}

    def network(self) -> SavedBytes:
        """Return the tensors between the network's input and its output."""
        return {"gate and up": 2 * self.inner * self.element}  # the backward computes their product again

    def first(self) -> SavedBytes:
        """Return what the embedding keeps."""
        return {"ids": self.num_tokens * ID_BYTES}

    def last(self) -> SavedBytes:
        """Return what the last norm, the head and the loss keep."""
        return {
            "last norm's input": self.local_tokens * (self.hidden * self.element + self.scale),
            "head's input": self.boundary_bytes,
            "logits": self.num_logits * self.element,
        }

    def mtp(self, has_table: bool) -> SavedBytes:
        """Return what the prediction of a second token keeps besides its layer; `has_table`: a copy of the embedding.

        One input of the two norms is the last norm's too.  Under sequence parallelism the projection's gathered output
        is kept, of which the layer's input is a view.
        """
        others = self.num_tokens - self.local_tokens
        return {
            **(self.first() if has_table else {}),
            "second norms' inputs": self.boundary_bytes + 2 * self.local_tokens * self.scale,
            "second projection's input": 2 * self.boundary_bytes,
            "second projection's output": others * self.hidden * self.element,
            **self.last(),
        }

    def shard(self, length: int) -> int:
        """Return this rank's part of a dimension that is sharded along tp."""
        part = shard_slice(length, self.plan.tp, self.tp_rank)
        return int(part.stop - part.start)


class ExpertTable(LayerTable):
    """What one rank keeps of a layer with experts, for one microbatch; every rank of tp routes all of its tokens.

    `rows`: that this rank receives, if they are known (default: as many as on average).
    """

    def __init__(
        self,
        model: V3MoEConfig,
        plan: PlanFields,
        num_rows: int,
        length: int,
        tp_rank: int = 0,
        rows: int | None = None,
    ) -> None:
        super().__init__(model, plan, num_rows, length, tp_rank)
        self.sparse = model
        self.num_slots = self.num_tokens * model.num_experts_per_token  # the copies of tokens that this rank sends
        self.num_received = self.num_slots if rows is None else rows
        # order and inverse of slots and rows, and the load of every expert
        self.route_bytes = (2 * (self.num_slots + self.num_received) + model.num_experts) * _INDEX

    @property
    def stored_bytes(self) -> int:
        """What the layer keeps from its forward to its backward: with recomputation its input, and its routes."""
        if not self.plan.recompute:
            return self.layer_bytes
        if not self.plan.overlap:
            return self.boundary_bytes + self.route_bytes
        shared = self.num_tokens * self.hidden * self.element if self.sparse.num_shared_experts else 0
        return self.boundary_bytes + shared + self._exchanged_bytes

    @property
    def working_bytes(self) -> int:
        """What a backward takes: among the experts, or where overlapped ones are gone, with what was before them."""
        if not (self.plan.recompute and self.plan.overlap):
            return super().working_bytes
        again = self.layer_bytes - self.stored_bytes - self._exchanged_bytes
        attention = sum(self.attention().values())  # its gradients are no larger
        return max(self.backward_bytes, again + 2 * self.boundary_bytes + attention)

    @cached_property
    def backward_bytes(self) -> int:
        """What a layer's backward takes at most: among its experts, whose gradients are computed in one call."""
        outputs, rows = self.num_slots * self.hidden, self.num_received
        inner = rows * (self.hidden + 4 * self.sparse.expert_ffn_size)
        weights = self.sparse.num_experts // self.plan.ep * self.sparse.expert_parameters
        return (self.local_tokens * self.hidden + outputs + inner + weights) * self.element

    @cached_property
    def _exchanged_bytes(self) -> int:
        return sum(self.exchanged().values())

    def network(self) -> SavedBytes:
        """Return what router and experts keep."""
        gathered = (self.num_tokens - self.local_tokens) * self.hidden * self.element
        return {"router's input, gathered": gathered, **self.router(), **self.exchanged()}

    def router(self) -> SavedBytes:
        """Return what the router and its loss keep."""
        config, is_sigmoid = self.sparse, self.sparse.scoring == "sigmoid"
        slots, scores = self.num_slots, self.num_tokens * config.num_experts * self.element
        kept = {"chosen experts": slots * _INDEX}
        if config.normalise or is_sigmoid:
            kept["chosen scores"] = slots * self.element * (2 if config.normalise and is_sigmoid else 1)
        else:
            kept["scores"] = scores
        if config.balance:
            kept["balance loss"] = scores * (3 if is_sigmoid else 2)
        return kept

    def exchanged(self) -> SavedBytes:
        """Return what is kept from the router's choice on, behind which overlapped layers are not run again."""
        rows, width = self.num_received, self.sparse.expert_ffn_size
        shared = self.num_tokens * self.shard(self.sparse.shared_ffn_size) if self.sparse.num_shared_experts else 0
        return {
            "weights": self.num_slots * self.element,
            "routes": self.route_bytes,
            "experts' rows": rows * self.hidden * self.element,
            "experts' gate and up": 2 * rows * width * self.element,
            "experts' outputs": self.num_slots * self.hidden * self.element,
            "shared gate and up": 2 * shared * self.element,
        }


class Tables(NamedTuple):
    """The tables of a model's layers on one rank: of dense ones, and of those from `first_sparse` on."""

    dense: LayerTable
    sparse: LayerTable
    first_sparse: int

    @classmethod
    def of(cls, model: ModelConfig, plan: PlanFields, num_rows: int, length: int, tp_rank: int = 0) -> "Tables":
        """Return those of a model."""
        dense = LayerTable(model, plan, num_rows, length, tp_rank)
        if isinstance(model, LlamaConfig):
            return cls(dense, dense, 0)
        return cls(dense, ExpertTable(model, plan, num_rows, length, tp_rank), model.num_dense_layers)

    def layer(self, number: int) -> LayerTable:
        """Return the table of the layer with this number."""
        return self.sparse if number >= self.first_sparse else self.dense

    def of_layers(self, numbers: Sequence[int]) -> list[LayerTable]:
        """Return the tables of ascending layers, each once."""
        return list(dict.fromkeys(self.layer(number) for number in (*numbers[:1], *numbers[-1:])))
