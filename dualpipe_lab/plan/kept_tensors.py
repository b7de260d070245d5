"""`LayerTable`: what the layers, the embedding and the head of a stage keep for the backward, tensor by tensor.

Chapter: book/tp/block.  In: a model, a plan, the tokens of a microbatch, the rules of a framework.  Out: named bytes.
With T tokens on the rank, T' = T / tp under sequence parallelism and T without, and b bytes per number:
  norms            2 T' (h b), and their scales 2 T' s
  inputs           of attention and network: 2 T' h b where the backward gathers them again, else 2 T h b
  heads            (a + 2 max(a_kv / tp, 1)) T d b, and the output a T d b, each with the rank's heads
  norms of heads   with `qk_norm` the inputs of two more norms, (a + a_kv) / tp T (d b + s)
  core             softmax and its dropout in full, 5 T S bytes per head in 16 bits; or a log-sum-exp per head and token
  network          gate and up, or the one input of a GPT's activation; and the product, if it is kept
  dropout          1 byte for each number behind attention and network
  recompute        the layer's input alone, and all of the above of one layer while its backward runs; of the parts that
                   `recomputes` names nothing: without the core sbh 34 of a GPT's sbh (34 + 5 a s / h) are kept
While a backward runs it also takes, in its turn: the loss; the head's gradients of its logits, weight and input; a
layer's gradients of the network's tensors, and the gradient of one weight before it is added to the others.
The rules of this library are proven by what autograd keeps; those of other frameworks are read from papers and sources.
Elsewhere: Megatron `theoretical_memory_usage.py`; SimuMax's `get_activation_info`.
Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 4.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.plan.fields import PlanFields
from dualpipe_lab.plan.gpt_config import GptConfig
from dualpipe_lab.plan.layer_traffic import ELEMENT_BYTES
from dualpipe_lab.plan.states import AnyModel, sizes_of
from dualpipe_lab.sharding import shard_slice

Certainty: TypeAlias = Literal["exact", "assumed", "fitted"]
Experts: TypeAlias = Literal["copied", "spread", "sharded"]  # along tp
REPEATED: dict[str, frozenset[str]] = {  # by the part of a layer that is run again, the tensors that are not kept
    "core_attn": frozenset({"softmax", "softmax's dropout", "log-sum-exp"}),
    "layernorm": frozenset({"attention's input", "network's input"}),
    "mla_up_proj": frozenset(
        {
            "latent of queries, normalised",
            "latent, normalised",
            "queries",
            "keys and values",
        }  # norms are in its modules
    ),
    "mlp": frozenset({"gate and up", "activation's input", "last product's input"}),
    "moe_act": frozenset({"experts' product"}),
}


def check_parts(parts: Iterable[str]) -> None:
    """Refuse a part of a layer that cannot be run again on its own.

    Raises:
        ValueError: naming it, and those that can.
    """
    if unknown := sorted(set(parts) - set(REPEATED)):
        raise ValueError(
            f"parts of a layer that can be run again are {', '.join(REPEATED)}, got {', '.join(unknown)}; a plan with "
            "recompute=True runs full layers again"
        )


@dataclass(frozen=True)
class KeepRules:
    """What a framework keeps for the backward.

    Attributes:
        name: of the rules.
        certainty: exact where the bytes are proven by a run of this library, else assumed.
        core: what attention keeps between heads and output: all of an unfused softmax, the log-sum-exp of a flash
            kernel, or nothing because the backward computes it again.
        recomputes: parts of a layer that the backward runs again, so that their results are not kept, by the names of
            Megatron's `--recompute-modules`: core_attn, layernorm, mla_up_proj, mlp (of dense layers), moe_act.
        scale_bytes: of a norm's scale per token; 0 for none, None for that of the weights, at least 4.
        regather: the backward gathers the input of a product again under sequence parallelism.
        keeps_product: the input of the last product is kept, not computed again from gate and up.
        keeps_angles: every layer keeps cosines and sines of the positions.
        keeps_unfolded: values are a view of what is unfolded from a latent, which so stays as a whole.
        keeps_exchanged: along cp attention's output is kept as it was before an exchange, or in a ring, too
            (`--cp-comm-type a2a` with Transformer Engine 2.8; this library's rings).
        sends_latents: along cp latents travel where they are shorter than keys and values.
        dropout: masks are kept.
        ids_bytes: per token, what the embedding's backward needs.
        logit_bytes: per logit, kept from the forward to the backward; None for those of the weights.
        loss_bytes: per logit, on top of that while the loss or its gradient is computed.
        weight_gradients: before they are added up: one at a time; or in buffers that stay, one of each shape in a
            layer, where the product adds them up itself (`get_dummy_wgrad` of Transformer Engine).
        buffers_head: the head has such a buffer (Megatron core 0.14).
        buffers_experts: experts have such buffers, of the shapes of one (Transformer Engine 2.10).
        experts: along tp; every rank has all that its place along ep has, and routes all tokens; or the ranks of tp
            share these out, and each routes its own tokens (`--expert-tensor-parallel-size 1`); or they shard each.
        weighs: what is multiplied by the router's weights and so kept: experts' products, or their outputs.
        keeps_routes: the order of experts' rows stays where their layer is recomputed.
        keeps_received: a stage keeps the last input that it received, and that input's gradient, until it receives the
            next one (Megatron's `set_input_tensor`, and `retain_grad` in `backward_step`).
        workspace_bytes: of libraries of products, which stay; for Megatron those of accelerators since H100, 32 MiB
            for cuBLAS in the forward's thread, in the backward's, and for Transformer Engine.
        expert_workspace_bytes: of the products of several experts, which run in 4 streams.
    """

    name: str
    certainty: Certainty = "assumed"
    core: Literal["unfused", "flash", "recomputed"] = "flash"
    scale_bytes: int | None = 0
    regather: bool = True
    keeps_product: bool = True
    keeps_angles: bool = False
    keeps_unfolded: bool = False
    keeps_exchanged: bool = False
    sends_latents: bool = False
    dropout: bool = False
    ids_bytes: int = 0
    logit_bytes: int | None = None
    loss_bytes: int = 0
    weight_gradients: Literal["one", "buffers"] = "one"
    buffers_head: bool = False
    buffers_experts: bool = False
    experts: Experts = "spread"
    weighs: Literal["products", "outputs"] = "products"
    keeps_routes: bool = False
    keeps_received: bool = False
    workspace_bytes: int = 0
    expert_workspace_bytes: int = 0
    recomputes: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "recomputes", frozenset(self.recomputes))
        check_parts(self.recomputes)


_WORKSPACE = 32 * 2**20
LAB = KeepRules(
    "this library", "exact", "recomputed", None, keeps_product=False, keeps_angles=True, ids_bytes=16, loss_bytes=8,
    keeps_unfolded=True, keeps_exchanged=True, sends_latents=True, experts="copied", weighs="outputs",
    keeps_routes=True,
)  # fmt: skip
KORTHIKANTI = KeepRules("arXiv 2205.05198", core="unfused", dropout=True, logit_bytes=4)
KORTHIKANTI_SELECTIVE = replace(
    KORTHIKANTI, name="arXiv 2205.05198, selective recomputation", recomputes=frozenset({"core_attn"})
)
MEGATRON = KeepRules(
    "Megatron with flash attention and fused sums of weight gradients",
    scale_bytes=4, ids_bytes=8, logit_bytes=4, loss_bytes=2, weight_gradients="buffers",
    buffers_head=True, buffers_experts=True,
    keeps_received=True, workspace_bytes=3 * _WORKSPACE, expert_workspace_bytes=4 * _WORKSPACE,
)  # fmt: skip
MEGATRON_DROPOUT = KeepRules(
    "Megatron with flash attention and dropout",
    scale_bytes=8, dropout=True, ids_bytes=8, logit_bytes=4, loss_bytes=2,
    keeps_received=True, workspace_bytes=3 * _WORKSPACE,
)  # fmt: skip


class KeptTensor(NamedTuple):
    """A tensor that a layer, or an end of the model, keeps on one rank for one microbatch."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class LayerTable:
    """What one rank keeps of each layer and of the model's ends, for one microbatch.

    Attributes:
        model: a Llama or a GPT; of a V3-style model the layers are those of `kept_experts`.
        plan: how it is trained.
        rules: of the framework.
        num_rows: sequences of a microbatch.
        length: tokens of each sequence on this rank, of cp.
        tp_rank: along tp, where shards are uneven.

    >>> plan, gpt = PlanFields(precision="bfloat16"), GptConfig(51200, 6144, 48, 64)
    >>> table = LayerTable(gpt, plan, KORTHIKANTI, num_rows=4, length=2048)
    >>> round(table.layer_bytes / (2048 * 4 * 6144), 3)  # 34 + 5 a s / h
    140.667
    """

    model: AnyModel
    plan: PlanFields
    rules: KeepRules
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

    @cached_property
    def stored_bytes(self) -> int:
        """What one layer keeps from its forward to its backward: with recomputation its input alone, or some parts."""
        if self.plan.recompute:
            return self.boundary_bytes
        return self.layer_bytes - self._repeated(self.layer())

    def _repeated(self, tensors: Iterable[KeptTensor]) -> int:
        """Return the bytes of tensors that are not kept, because the parts that make them are run again."""
        gone = frozenset[str]().union(*(REPEATED[part] for part in self.rules.recomputes))
        return sum(tensor.num_bytes for tensor in tensors if tensor.name in gone)

    @property
    def boundary_bytes(self) -> int:
        """What a stage sends to the next one."""
        return self.local_tokens * self.hidden * self.element

    @property
    def loss_bytes(self) -> int:
        """What the loss takes on top of what is kept, while it or its gradient is computed."""
        return self._num_logits * self.rules.loss_bytes

    @property
    def output_grad_bytes(self) -> int:
        """The gradient of logits, where a stage computes it in its forward; a loss in chunks has none."""
        return self._num_logits * self.element if self.plan.loss_chunk is None else 0

    @property
    def head_bytes(self) -> int:
        """What the head's backward takes: the gradients of its logits and its weight, its input and that's gradient."""
        weight = 0 if self.rules.buffers_head else self.head_weight
        return (self._num_logits + weight + 2 * self.num_tokens * self.hidden) * self.element

    @property
    def head_weight(self) -> int:
        """Elements of the head's weight on this rank."""
        return self.shard(self._sizes.vocabulary_size) * self.hidden

    @cached_property
    def backward_bytes(self) -> int:
        """What a layer's backward takes at most: in its network, between the two or three products."""
        inner, is_gated = self._inner, not isinstance(self.model, GptConfig)
        gradients = self.local_tokens * self.hidden + (3 if is_gated else 2) * inner
        again = inner if is_gated and not self.rules.keeps_product else 0
        gathered = self.num_tokens * self.hidden if self.plan.sequence_parallel and self.rules.regather else 0
        weight = max(self.weights.values()) if self.rules.weight_gradients == "one" else 0
        return (gradients + again + gathered + weight) * self.element

    @property
    def working_bytes(self) -> int:
        """What a layer's backward takes above what is stored of it: with recomputation all of the layer is back.

        Where parts are run again, those of the network are there at first, and those of attention when it is gone.
        """
        if self.plan.recompute or not self.rules.recomputes:
            return self.backward_bytes + self.layer_bytes - self.stored_bytes
        network = self._repeated([KeptTensor("network's input", self.input_bytes), *self.network()])
        attention = self._repeated(self.attention())
        left = sum(tensor.num_bytes for tensor in self.network()) - self._repeated(self.network())
        return max(self.backward_bytes + network, attention + 2 * self.boundary_bytes - left)

    @cached_property
    def weights(self) -> dict[str, int]:
        """Elements of the weights of a layer's products on this rank, by what they are."""
        return {**self.attention_weights, **self.network_weights}

    @property
    def attention_weights(self) -> dict[str, int]:
        """Those of attention: heads, and their output."""
        config, hidden, tp = self._sizes, self.hidden, self.plan.tp
        heads = config.num_heads // tp + 2 * max(config.num_kv_heads // tp, 1)
        inner = config.num_heads // tp * config.size_of_head
        return {"heads": heads * config.size_of_head * hidden, "attention's output": inner * hidden}

    @property
    def network_weights(self) -> dict[str, int]:
        """Those of the network: in and out."""
        ffn, into = self.shard(self._sizes.ffn_size) * self.hidden, 1 if isinstance(self.model, GptConfig) else 2
        return {"network in": into * ffn, "network out": ffn}

    def layer(self) -> Iterator[KeptTensor]:
        """Yield the tensors of one layer, in the order of its forward."""
        norm, mask = self.local_tokens * (self.hidden * self.element + self.scale), self.local_tokens * self.hidden
        yield KeptTensor("attention norm's input", norm)
        yield from self.attention()
        if self.rules.dropout:
            yield KeptTensor("attention's dropout mask", mask)
        yield KeptTensor("network norm's input", norm)
        yield KeptTensor("network's input", self.input_bytes)
        yield from self.network()
        if self.rules.dropout:
            yield KeptTensor("network's dropout mask", mask)

    def attention(self) -> Iterator[KeptTensor]:
        """Yield the tensors of attention."""
        yield KeptTensor("attention's input", self.input_bytes)
        yield from self.heads()

    def heads(self) -> Iterator[KeptTensor]:
        """Yield the tensors between the two products of attention."""
        config, tp, per_head = self._sizes, self.plan.tp, self.num_tokens * self._sizes.size_of_head * self.element
        heads = config.num_heads // tp
        if self._sizes.qk_norm:
            norms = heads + max(config.num_kv_heads // tp, 1)
            yield KeptTensor("norms of heads", norms * (per_head + self.num_tokens * self.scale))
        yield KeptTensor("queries", heads * per_head)
        yield KeptTensor("keys and values", 2 * max(config.num_kv_heads // tp, 1) * per_head)
        if self.rules.keeps_angles:
            yield KeptTensor("angles", self.length * config.size_of_head * self.element)
        yield from self.core(heads)
        yield from self.output(heads * per_head, heads * per_head)

    def output(self, num_bytes: int, before: int) -> Iterator[KeptTensor]:
        """Yield attention's output, and what of it is kept before an exchange."""
        if self.plan.cp > 1 and self.rules.keeps_exchanged:
            yield KeptTensor("attention's output before the exchange", before)
        yield KeptTensor("attention's output", num_bytes)

    def core(self, heads: int) -> Iterator[KeptTensor]:
        """Yield what is kept between heads and output."""
        in_ring = self.plan.cp > 1 and self.rules.core == "recomputed"  # which needs it to weigh the ranks' parts
        if self.rules.core == "flash" or in_ring:
            each = max(4, self.element) if in_ring else 4
            yield KeptTensor("log-sum-exp", heads * self.num_tokens * each)
        elif self.rules.core == "unfused":
            scores = heads * self.num_tokens * self.length
            yield KeptTensor("softmax", scores * self.element)
            if self.rules.dropout:
                yield KeptTensor("softmax's dropout", scores * (self.element + 1))

    def network(self) -> Iterator[KeptTensor]:
        """Yield the tensors between the products of the network."""
        inner = self._inner * self.element
        is_gated = not isinstance(self.model, GptConfig)
        yield KeptTensor("gate and up" if is_gated else "activation's input", (2 if is_gated else 1) * inner)
        if self.rules.keeps_product:
            yield KeptTensor("last product's input", inner)

    def first(self) -> Iterator[KeptTensor]:
        """Yield what the embedding keeps."""
        if self.rules.ids_bytes:
            yield KeptTensor("ids", self.num_tokens * self.rules.ids_bytes)
        if self.rules.dropout:
            yield KeptTensor("embedding's dropout mask", self.local_tokens * self.hidden)

    def last(self) -> Iterator[KeptTensor]:
        """Yield what the last norm, the head and the loss keep."""
        yield KeptTensor("last norm's input", self.local_tokens * (self.hidden * self.element + self.scale))
        yield KeptTensor("head's input", self.input_bytes)
        each = self.element if self.rules.logit_bytes is None else self.rules.logit_bytes
        yield KeptTensor("logits", self._num_logits * each)

    @property
    def _sizes(self) -> LlamaConfig:
        return sizes_of(self.model)

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
        return max(4, self.element) if self.rules.scale_bytes is None else self.rules.scale_bytes

    @property
    def local_tokens(self) -> int:
        """The tokens of this rank between the layers."""
        return self.num_tokens // self.plan.tp if self.plan.sequence_parallel else self.num_tokens

    @property
    def input_bytes(self) -> int:
        """Bytes of the input of a product of the hidden size, as it is kept."""
        return self.kept_tokens * self.hidden * self.element

    @property
    def kept_tokens(self) -> int:
        """The tokens of a product's input that are kept."""
        return self.local_tokens if self.rules.regather else self.num_tokens

    @property
    def _inner(self) -> int:
        """Numbers between the products of the network."""
        return self.num_tokens * self.shard(self._sizes.ffn_size)

    @property
    def _num_logits(self) -> int:
        """The logits of a microbatch that exist at the same time on this rank."""
        tokens = self.num_tokens if self.plan.loss_chunk is None else min(self.plan.loss_chunk, self.num_tokens)
        return tokens * self.shard(self._sizes.vocabulary_size)

    def shard(self, length: int) -> int:
        """Return this rank's part of a dimension that is sharded along tp."""
        part = shard_slice(length, self.plan.tp, self.tp_rank)
        return int(part.stop - part.start)
