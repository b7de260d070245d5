"""What the layers, the embedding and the head of a stage keep for the backward, tensor by tensor, on one rank.

Chapter: book/tp/block, book/tp/latent-attention, book/ep/v3-moe, book/whole/two-tokens.
In: a model, a plan, the tokens of a microbatch.  Out: named bytes, as autograd keeps them in this library.
With T tokens on the rank, T' = T / tp under sequence parallelism and T without, a' heads, b bytes per number, and s
bytes per norm and token (4 at least):
  norms            2 T' (h b + s)
  inputs           of attention and network 2 T' h b: the backward gathers them again
  heads            (a' + 2 a_kv') T d b and the angles S d b; attention's output a' T d b, in a ring of cp twice and its
                   log-sum-exp; of softmax nothing, which the backward computes again; with `qk_norm` two more norms
  latents          T' (r_q + r_kv + d_position) b before their norms, T' (r_q + r_kv) b behind them; queries, keys and
                   values unfolded; along cp latents stay in place of keys and values where they are shorter
  network          gate and up, 2 T f b / tp: the product of the two is computed again
  experts          their rows R h b, gate and up 2 R f_e b, all k outputs of a token, weights, routes, scores
  second token     norms, projection, head and logits once more
  recompute        the layer's input alone, and all of the above of one layer while its backward runs; of overlapped
                   experts also what they keep: only what is before the exchanges is run again
While a backward runs it also takes, in its turn: the loss; the head's gradients of its logits, weight and input; a
layer's gradients of the network's tensors, and the gradient of one weight before it is added to the others.
R is the k T slots of a rank on average, whatever ep is: a rank has fewer experts and receives the tokens of more ranks.
The fullest rank has `imbalance` times as many, at most min(k, E / ep) for each token of all ranks of ep.
Elsewhere: Megatron `theoretical_memory_usage.py`; SimuMax's `get_activation_info`.
Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 4.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple

from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.stage_rules import ModelConfig
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.plan.layer_traffic import ELEMENT_BYTES
from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.plan.states import sizes_of
from dualpipe_lab.sharding import shard_slice
from dualpipe_lab.tp.latent_sizes import LatentSizes

ID_BYTES = 16  # of a token, for the embedding's backward
_LOSS_BYTES = 8  # per logit, while the loss or its gradient is computed
_INDEX = 8  # of an expert or a row


class KeptTensor(NamedTuple):
    """A tensor that a layer, or an end of the model, keeps on one rank for one microbatch."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class LayerTable:
    """What one rank keeps of each dense layer and of the model's ends, for one microbatch.

    Attributes:
        model: of the layer.
        plan: how it is trained.
        num_rows: sequences of a microbatch.
        length: tokens of each sequence on this rank of cp.
        tp_rank: along tp, where shards are uneven.

    >>> table = LayerTable(LlamaConfig(), Plan(), num_rows=1, length=8)
    >>> [tensor.name for tensor in table.network()], table.layer_bytes
    (['gate and up'], 25152)
    """

    model: ModelConfig
    plan: Plan
    num_rows: int
    length: int
    tp_rank: int = 0

    @property
    def num_tokens(self) -> int:
        """T, the tokens of a microbatch on this rank of cp."""
        return self.num_rows * self.length

    @cached_property
    def layer_bytes(self) -> int:
        """What one layer keeps while its forward is not recomputed."""
        return sum(tensor.num_bytes for tensor in self.layer())

    @property
    def stored_bytes(self) -> int:
        """What one layer keeps from its forward to its backward: with recomputation its input alone."""
        return self.boundary_bytes if self.plan.recompute else self.layer_bytes

    @property
    def boundary_bytes(self) -> int:
        """What a stage sends to the next one."""
        return self.local_tokens * self.hidden * self.element

    @property
    def loss_bytes(self) -> int:
        """What the loss takes on top of what is kept, while it or its gradient is computed."""
        return self._num_logits * _LOSS_BYTES

    @property
    def output_grad_bytes(self) -> int:
        """The gradient of logits, where a stage computes it in its forward; a loss in chunks has none."""
        return self._num_logits * self.element if self.plan.loss_chunk is None else 0

    @property
    def head_bytes(self) -> int:
        """What the head's backward takes: the gradients of logits and weight, the head's input and its gradient."""
        weight = self.shard(self._sizes.vocabulary_size) * self.hidden
        return (self._num_logits + weight + 2 * self.num_tokens * self.hidden) * self.element

    @cached_property
    def backward_bytes(self) -> int:
        """What a layer's backward takes at most: in its network, between the two or three products."""
        gradients = self.local_tokens * self.hidden + 4 * self._inner
        gathered = self.num_tokens * self.hidden if self.plan.sequence_parallel else 0
        return (gradients + gathered + max(self.weights())) * self.element

    @property
    def working_bytes(self) -> int:
        """What a layer's backward takes above what is stored of it: with recomputation all of the layer is back."""
        return self.backward_bytes + self.layer_bytes - self.stored_bytes

    def weights(self) -> list[int]:
        """Return the elements of the weights of a layer's products on this rank."""
        config, hidden, tp, latent = self._sizes, self.hidden, self.plan.tp, self.latent
        ffn = self.shard(config.ffn_size) * hidden
        if latent is None:
            heads = (self._heads + 2 * max(config.num_kv_heads // tp, 1)) * config.size_of_head * hidden
            return [heads, self._heads * config.size_of_head * hidden, 2 * ffn, ffn]
        queries = [] if latent.query_rank is None else [hidden * latent.query_rank]
        return [
            *queries,
            self._heads * latent.key * (latent.query_rank or hidden),
            hidden * latent.cached,
            self._heads * (latent.content + latent.value) * latent.kv_rank,
            self._heads * latent.value * hidden,
            2 * ffn,
            ffn,
        ]

    def layer(self) -> Iterator[KeptTensor]:
        """Yield the tensors of one layer, in the order of its forward."""
        norm = self.local_tokens * (self.hidden * self.element + self.scale)
        yield KeptTensor("attention norm's input", norm)
        yield KeptTensor("attention's input", self.boundary_bytes)
        yield from self._attention() if self.latent is None else self._latent_attention(self.latent)
        yield KeptTensor("network norm's input", norm)
        yield KeptTensor("network's input", self.boundary_bytes)
        yield from self.network()

    def _attention(self) -> Iterator[KeptTensor]:
        config, per_head = self._sizes, self.num_tokens * self._sizes.size_of_head * self.element
        kv_heads = max(config.num_kv_heads // self.plan.tp, 1)
        if config.qk_norm:
            norms = (self._heads + kv_heads) * (per_head + self.num_tokens * self.scale)
            yield KeptTensor("norms of heads", norms)
        yield KeptTensor("queries", self._heads * per_head)
        yield KeptTensor("keys and values", 2 * kv_heads * per_head)
        yield KeptTensor("angles", self.length * config.size_of_head * self.element)
        yield from self._output(self._heads * per_head, self._heads * per_head)

    def _latent_attention(self, sizes: LatentSizes) -> Iterator[KeptTensor]:
        """Latents before and behind their norms, then what is unfolded from them.

        Values are a view of what is unfolded, content of keys included.  A ring takes values of the size of keys.
        """
        tokens, each = self.local_tokens, self._heads * self.num_tokens * self.element
        if sizes.query_rank is not None:
            yield KeptTensor("latent of queries", tokens * (sizes.query_rank * self.element + self.scale))
            yield KeptTensor("latent of queries, normalised", tokens * sizes.query_rank * self.element)
        yield KeptTensor("latent of keys and values", tokens * (sizes.cached * self.element + self.scale))
        travels = self.plan.cp > 1 and sizes.is_shorter(self._heads)
        pads = self.plan.cp > 1 and not travels
        yield KeptTensor("queries", each * sizes.key)
        if travels:
            yield KeptTensor("latents that travel", self.num_tokens * sizes.cached * self.element)
        else:
            rest = sizes.key if pads else sizes.value + sizes.content
            yield KeptTensor("latent, normalised", tokens * sizes.kv_rank * self.element)
            yield KeptTensor("keys and values", each * (sizes.key + rest))
        yield KeptTensor("angles", self.length * sizes.position * self.element)
        yield from self._output(each * sizes.value, each * (sizes.key if pads else sizes.value))

    def _output(self, num_bytes: int, before: int) -> Iterator[KeptTensor]:
        if self.plan.cp > 1:
            yield KeptTensor("log-sum-exp", self._heads * self.num_tokens * max(4, self.element))
            yield KeptTensor("attention's output before the exchange", before)
        yield KeptTensor("attention's output", num_bytes)

    def network(self) -> Iterator[KeptTensor]:
        """Yield the tensors between the network's input and its output."""
        yield KeptTensor("gate and up", 2 * self._inner * self.element)

    def first(self) -> Iterator[KeptTensor]:
        """Yield what the embedding keeps."""
        yield KeptTensor("ids", self.num_tokens * ID_BYTES)

    def last(self) -> Iterator[KeptTensor]:
        """Yield what the last norm, the head and the loss keep."""
        yield KeptTensor("last norm's input", self.local_tokens * (self.hidden * self.element + self.scale))
        yield KeptTensor("head's input", self.boundary_bytes)
        yield KeptTensor("logits", self._num_logits * self.element)

    def second(self, has_table: bool) -> Iterator[KeptTensor]:
        """Yield what the prediction of a second token keeps besides its layer; `has_table`: a copy of the embedding.

        One input of the two norms is the last norm's too.  Under sequence parallelism the projection's gathered output
        is kept, of which the layer's input is a view.
        """
        if has_table:
            yield from self.first()
        yield KeptTensor("second norms' inputs", self.boundary_bytes + 2 * self.local_tokens * self.scale)
        yield KeptTensor("second projection's input", 2 * self.boundary_bytes)
        others = self.num_tokens - self.local_tokens
        yield KeptTensor("second projection's output", others * self.hidden * self.element)
        yield from self.last()

    @property
    def latent(self) -> LatentSizes | None:
        """The sizes of latent attention, or None."""
        return None if isinstance(self.model, LlamaConfig) else self.model.latent

    @property
    def hidden(self) -> int:
        """h, the hidden size."""
        return self._sizes.hidden_size

    @property
    def element(self) -> int:
        """b, the bytes of a number."""
        return ELEMENT_BYTES[self.plan.precision]

    @property
    def scale(self) -> int:
        """Bytes of a norm's scale, per token."""
        return max(4, self.element)

    @property
    def local_tokens(self) -> int:
        """The tokens of this rank between the layers."""
        return self.num_tokens // self.plan.tp if self.plan.sequence_parallel else self.num_tokens

    def shard(self, length: int) -> int:
        """Return this rank's part of a dimension that is sharded along tp."""
        part = shard_slice(length, self.plan.tp, self.tp_rank)
        return int(part.stop - part.start)

    @property
    def _sizes(self) -> LlamaConfig:
        return sizes_of(self.model)

    @property
    def _heads(self) -> int:
        return self._sizes.num_heads // self.plan.tp

    @property
    def _inner(self) -> int:
        return self.num_tokens * self.shard(self._sizes.ffn_size)

    @property
    def _num_logits(self) -> int:
        tokens = self.num_tokens if self.plan.loss_chunk is None else min(self.plan.loss_chunk, self.num_tokens)
        return tokens * self.shard(self._sizes.vocabulary_size)


@dataclass(frozen=True)
class ExpertTable(LayerTable):
    """What one rank keeps of a layer with experts, for one microbatch; every rank of tp routes all of its tokens.

    Attributes:
        imbalance: rows of the fullest rank, divided by their mean.
        rows: that this rank receives, if they are known; None for those of the imbalance.

    >>> config = V3MoEConfig(hidden_size=7168, expert_ffn_size=2048, num_experts=256, num_experts_per_token=8)
    >>> plan = Plan(dp=8, ep=8, experts_in_data=True, precision="bfloat16")
    >>> table, alone = (ExpertTable(config, one, 1, 4096) for one in (plan, Plan(precision="bfloat16")))
    >>> table.num_received, table.layer_bytes == alone.layer_bytes
    (32768, True)
    """

    imbalance: float = 1.0
    rows: int | None = None

    @property
    def sparse(self) -> V3MoEConfig:
        """The model, which has experts."""
        assert isinstance(self.model, V3MoEConfig)
        return self.model

    @property
    def num_slots(self) -> int:
        """S, the copies of tokens that this rank sends."""
        return self.num_tokens * self.sparse.num_experts_per_token

    @property
    def num_received(self) -> int:
        """R, the rows that its experts receive."""
        if self.rows is not None:
            return self.rows
        k, ep = self.sparse.num_experts_per_token, self.plan.ep
        most = self.num_tokens * ep * min(k, self.sparse.num_experts // ep)
        return min(ceil(self.num_slots * self.imbalance), most)

    @property
    def route_bytes(self) -> int:
        """Order and inverse of slots and rows, and the load of every expert."""
        return (2 * (self.num_slots + self.num_received) + self.sparse.num_experts) * _INDEX

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
        """What a backward takes: among the experts, or where overlapped ones are gone and what was before is run again.

        The gradients of attention are as large as its tensors, at most.
        """
        if not (self.plan.recompute and self.plan.overlap):
            return super().working_bytes
        again = self.layer_bytes - self.stored_bytes - self._exchanged_bytes
        attention = self._attention() if self.latent is None else self._latent_attention(self.latent)
        return max(self.backward_bytes, again + 2 * self.boundary_bytes + sum(one.num_bytes for one in attention))

    @cached_property
    def backward_bytes(self) -> int:
        """What a layer's backward takes at most: among its experts, whose gradients are computed in one call."""
        outputs, rows = self.num_slots * self.hidden, self.num_received
        inner = rows * (self.hidden + 4 * self.sparse.expert_ffn_size)
        weights = self.sparse.num_experts // self.plan.ep * self.sparse.expert_parameters
        return (self.local_tokens * self.hidden + outputs + inner + weights) * self.element

    @property
    def _exchanged_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.exchanged())

    def network(self) -> Iterator[KeptTensor]:
        """Yield the tensors between the network's input and its output."""
        if self.num_tokens > self.local_tokens:
            others = self.num_tokens - self.local_tokens
            yield KeptTensor("router's input, gathered", others * self.hidden * self.element)
        yield from self.router()
        yield from self.exchanged()

    def router(self) -> Iterator[KeptTensor]:
        """Yield what the router and its loss keep."""
        config, is_sigmoid = self.sparse, self.sparse.scoring == "sigmoid"
        slots, scores = self.num_slots, self.num_tokens * config.num_experts * self.element
        if config.normalise or is_sigmoid:
            slopes = config.normalise and is_sigmoid
            yield KeptTensor("chosen scores", slots * self.element * (2 if slopes else 1))
        else:
            yield KeptTensor("scores", scores)
        yield KeptTensor("chosen experts", slots * _INDEX)
        if config.balance:
            yield KeptTensor("balance loss", scores * (3 if is_sigmoid else 2))

    def exchanged(self) -> Iterator[KeptTensor]:
        """Yield what is kept from the router's choice on, behind which overlapped layers are not run again."""
        rows, width = self.num_received, self.sparse.expert_ffn_size
        yield KeptTensor("weights", self.num_slots * self.element)
        yield KeptTensor("routes", self.route_bytes)
        yield KeptTensor("experts' rows", rows * self.hidden * self.element)
        yield KeptTensor("experts' gate and up", 2 * rows * width * self.element)
        yield KeptTensor("experts' outputs", self.num_slots * self.hidden * self.element)
        if self.sparse.num_shared_experts:
            shared = self.num_tokens * self.shard(self.sparse.shared_ffn_size)
            yield KeptTensor("shared gate and up", 2 * shared * self.element)


class Tables(NamedTuple):
    """The tables of a model's layers on one rank: of dense ones, and of those from `first_sparse` on."""

    dense: LayerTable
    sparse: LayerTable
    first_sparse: int

    @classmethod
    def of(
        cls, model: ModelConfig, plan: Plan, num_rows: int, length: int, tp_rank: int = 0, imbalance: float = 1.0
    ) -> "Tables":
        """Return those of a model; the arguments are those of `ExpertTable`."""
        dense = LayerTable(model, plan, num_rows, length, tp_rank)
        if isinstance(model, LlamaConfig):
            return cls(dense, dense, 0)
        return cls(dense, ExpertTable(model, plan, num_rows, length, tp_rank, imbalance), model.num_dense_layers)

    def layer(self, number: int) -> LayerTable:
        """Return the table of the layer with this number."""
        return self.sparse if number >= self.first_sparse else self.dense

    def of_layers(self, numbers: Sequence[int]) -> list[LayerTable]:
        """Return the tables of ascending layers, each once."""
        ends = [self.layer(number) for number in (*numbers[:1], *numbers[-1:])]
        return ends if len(ends) == 2 and ends[0] is not ends[1] else ends[:1]
