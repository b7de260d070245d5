"""`LayerTable`: what the layers, the embedding and the head of a stage keep for the backward, tensor by tensor.

Chapter: book/tp/block.  In: a model, a plan, the tokens of a microbatch, the rules of a framework.  Out: named bytes.
With T tokens on the rank, T' = T / tp under sequence parallelism and T without, and b bytes per number:
  norms            2 T' (h b), and their scales 2 T' s
  inputs           of attention and network: 2 T' h b where the backward gathers them again, else 2 T h b
  heads            (a + 2 max(a_kv / tp, 1)) T d b, and the output a T d b, each with the rank's heads
  core             softmax and its dropout in full, 5 T S bytes per head in 16 bits; or a log-sum-exp per head and token
  network          gate and up, or the one input of a GPT's activation; and the product, if it is kept
  dropout          1 byte for each number behind attention and network
  recompute        the layer's input alone, and all of the above of one layer while its backward runs
While a backward runs it also takes, in its turn: the loss; the head's gradients of its logits, weight and input; a
layer's gradients of the network's tensors, and the gradient of one weight before it is added to the others.
The rules of this library are proven by what autograd keeps; those of other frameworks are read from papers and sources.
Elsewhere: Megatron `theoretical_memory_usage.py`; SimuMax's `get_activation_info`.
Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 4.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.plan.fields import PlanFields
from dualpipe_lab.plan.gpt_config import GptConfig
from dualpipe_lab.plan.layer_traffic import ELEMENT_BYTES
from dualpipe_lab.sharding import shard_slice

Dense: TypeAlias = LlamaConfig | GptConfig
Certainty: TypeAlias = Literal["exact", "assumed", "fitted"]


@dataclass(frozen=True)
class KeepRules:
    """What a framework keeps for the backward.

    Attributes:
        name: of the rules.
        certainty: exact where the bytes are proven by a run of this library, else assumed.
        core: what attention keeps between heads and output: all of an unfused softmax, the log-sum-exp of a flash
            kernel, or nothing because the backward computes it again.
        scale_bytes: of a norm's scale per token; 0 for none, None for that of the weights, at least 4.
        regather: the backward gathers the input of a product again under sequence parallelism.
        keeps_product: the input of the last product is kept, not computed again from gate and up.
        keeps_angles: every layer keeps cosines and sines of the positions.
        dropout: masks are kept.
        ids_bytes: per token, what the embedding's backward needs.
        logit_bytes: per logit, kept from the forward to the backward; None for those of the weights.
        loss_bytes: per logit, on top of that while the loss or its gradient is computed.
        weight_gradients: before they are added up: one at a time; or in buffers that stay, one of each shape in a
            layer, where the product adds them up itself (`get_dummy_wgrad` of Transformer Engine).
        keeps_received: a stage keeps the last input that it received, and that input's gradient, until it receives the
            next one (Megatron's `set_input_tensor`, and `retain_grad` in `backward_step`).
        workspace_bytes: of libraries of products, which stay; for Megatron those of accelerators since H100, 32 MiB
            for cuBLAS in the forward's thread, in the backward's, and for Transformer Engine.
    """

    name: str
    certainty: Certainty = "assumed"
    core: Literal["unfused", "flash", "recomputed"] = "flash"
    scale_bytes: int | None = 0
    regather: bool = True
    keeps_product: bool = True
    keeps_angles: bool = False
    dropout: bool = False
    ids_bytes: int = 0
    logit_bytes: int | None = None
    loss_bytes: int = 0
    weight_gradients: Literal["one", "buffers"] = "one"
    keeps_received: bool = False
    workspace_bytes: int = 0


_HOPPER_WORKSPACES = 3 * 32 * 2**20
LAB = KeepRules(
    "this library", "exact", "recomputed", None, keeps_product=False, keeps_angles=True, ids_bytes=16, loss_bytes=8
)
KORTHIKANTI = KeepRules("arXiv 2205.05198", core="unfused", dropout=True, logit_bytes=4)
KORTHIKANTI_SELECTIVE = KeepRules(
    "arXiv 2205.05198, selective recomputation", core="recomputed", dropout=True, logit_bytes=4
)
MEGATRON = KeepRules(
    "Megatron with flash attention and fused sums of weight gradients",
    scale_bytes=4, ids_bytes=8, logit_bytes=4, loss_bytes=2, weight_gradients="buffers",
    keeps_received=True, workspace_bytes=_HOPPER_WORKSPACES,
)  # fmt: skip
MEGATRON_DROPOUT = KeepRules(
    "Megatron with flash attention and dropout",
    scale_bytes=8, dropout=True, ids_bytes=8, logit_bytes=4, loss_bytes=2,
    keeps_received=True, workspace_bytes=_HOPPER_WORKSPACES,
)  # fmt: skip


class KeptTensor(NamedTuple):
    """A tensor that a layer, or an end of the model, keeps on one rank for one microbatch."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class LayerTable:
    """What one rank keeps of each layer and of the model's ends, for one microbatch.

    Attributes:
        model: a Llama or a GPT.
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

    model: Dense
    plan: PlanFields
    rules: KeepRules
    num_rows: int
    length: int
    tp_rank: int = 0

    @property
    def num_tokens(self) -> int:
        """T, the tokens of a microbatch on this rank of cp."""
        return self.num_rows * self.length

    @property
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
        return self._shared * self._hidden * self._element

    @property
    def loss_bytes(self) -> int:
        """What the loss takes on top of what is kept, while it or its gradient is computed."""
        return self._num_logits * self.rules.loss_bytes

    @property
    def head_bytes(self) -> int:
        """What the head's backward takes: the gradients of its logits and its weight, its input and that's gradient."""
        weight = self._shard(self._sizes.vocabulary_size) * self._hidden
        return (self._num_logits + weight + 2 * self.num_tokens * self._hidden) * self._element

    @property
    def backward_bytes(self) -> int:
        """What a layer's backward takes at most: in its network, between the two or three products."""
        inner, is_gated = self._inner, isinstance(self.model, LlamaConfig)
        gradients = self._shared * self._hidden + (3 if is_gated else 2) * inner
        again = inner if is_gated and not self.rules.keeps_product else 0
        gathered = self.num_tokens * self._hidden if self.plan.sequence_parallel and self.rules.regather else 0
        weight = max(self.weights) if self.rules.weight_gradients == "one" else 0
        return (gradients + again + gathered + weight) * self._element

    @property
    def weights(self) -> tuple[int, ...]:
        """Elements of the weights of a layer's products on this rank: heads, their output, network in and out."""
        config, hidden, tp = self._sizes, self._hidden, self.plan.tp
        heads = config.num_heads // tp + 2 * max(config.num_kv_heads // tp, 1)
        ffn = self._shard(config.ffn_size) * hidden
        into = 2 if isinstance(self.model, LlamaConfig) else 1
        return (
            heads * config.size_of_head * hidden,
            config.num_heads // tp * config.size_of_head * hidden,
            into * ffn,
            ffn,
        )

    @property
    def buffer_bytes(self) -> int:
        """What stays for the gradients of weights, besides those that are added up, and for products."""
        gradients = sum(self.weights) * self._element if self.rules.weight_gradients == "buffers" else 0
        return gradients + self.rules.workspace_bytes

    def layer(self) -> Iterator[KeptTensor]:
        """Yield the tensors of one layer, in the order of its forward."""
        tokens, input_bytes = self._shared, self._gathered * self._hidden * self._element
        norm = tokens * self._hidden * self._element
        scale = tokens * self._scale
        yield KeptTensor("attention norm's input", norm + scale)
        yield KeptTensor("attention's input", input_bytes)
        yield from self.heads()
        if self.rules.dropout:
            yield KeptTensor("attention's dropout mask", tokens * self._hidden)
        yield KeptTensor("network norm's input", norm + scale)
        yield KeptTensor("network's input", input_bytes)
        yield from self.network()
        if self.rules.dropout:
            yield KeptTensor("network's dropout mask", tokens * self._hidden)

    def heads(self) -> Iterator[KeptTensor]:
        """Yield the tensors between the two products of attention."""
        config, tp, per_head = self._sizes, self.plan.tp, self.num_tokens * self._sizes.size_of_head * self._element
        heads = config.num_heads // tp
        yield KeptTensor("queries", heads * per_head)
        yield KeptTensor("keys and values", 2 * max(config.num_kv_heads // tp, 1) * per_head)
        if self.rules.keeps_angles:
            yield KeptTensor("angles", self.length * config.size_of_head * self._element)
        if self.rules.core == "flash":
            yield KeptTensor("log-sum-exp", heads * self.num_tokens * 4)
        elif self.rules.core == "unfused":
            scores = heads * self.num_tokens * self.length
            yield KeptTensor("softmax", scores * self._element)
            if self.rules.dropout:
                yield KeptTensor("softmax's dropout", scores * (self._element + 1))
        yield KeptTensor("attention's output", heads * per_head)

    def network(self) -> Iterator[KeptTensor]:
        """Yield the tensors between the products of the network."""
        inner = self._inner * self._element
        is_gated = isinstance(self.model, LlamaConfig)
        yield KeptTensor("gate and up" if is_gated else "activation's input", (2 if is_gated else 1) * inner)
        if self.rules.keeps_product:
            yield KeptTensor("last product's input", inner)

    def first(self) -> Iterator[KeptTensor]:
        """Yield what the embedding keeps."""
        if self.rules.ids_bytes:
            yield KeptTensor("ids", self.num_tokens * self.rules.ids_bytes)
        if self.rules.dropout:
            yield KeptTensor("embedding's dropout mask", self._shared * self._hidden)

    def last(self) -> Iterator[KeptTensor]:
        """Yield what the last norm, the head and the loss keep."""
        yield KeptTensor("last norm's input", self._shared * (self._hidden * self._element + self._scale))
        yield KeptTensor("head's input", self._gathered * self._hidden * self._element)
        each = self._element if self.rules.logit_bytes is None else self.rules.logit_bytes
        yield KeptTensor("logits", self._num_logits * each)

    @property
    def _sizes(self) -> LlamaConfig:
        return self.model if isinstance(self.model, LlamaConfig) else self.model.outline

    @property
    def _hidden(self) -> int:
        return self._sizes.hidden_size

    @property
    def _element(self) -> int:
        return ELEMENT_BYTES[self.plan.precision]

    @property
    def _scale(self) -> int:
        """Bytes of a norm's scale, per token."""
        return max(4, self._element) if self.rules.scale_bytes is None else self.rules.scale_bytes

    @property
    def _shared(self) -> int:
        """The tokens of this rank between the layers."""
        return self.num_tokens // self.plan.tp if self.plan.sequence_parallel else self.num_tokens

    @property
    def _gathered(self) -> int:
        """The tokens of a product's input that are kept."""
        return self._shared if self.rules.regather else self.num_tokens

    @property
    def _inner(self) -> int:
        """Numbers between the products of the network."""
        return self.num_tokens * self._shard(self._sizes.ffn_size)

    @property
    def _num_logits(self) -> int:
        """The logits of a microbatch that exist at the same time on this rank."""
        tokens = self.num_tokens if self.plan.loss_chunk is None else min(self.plan.loss_chunk, self.num_tokens)
        return tokens * self._shard(self._sizes.vocabulary_size)

    def _shard(self, length: int) -> int:
        part = shard_slice(length, self.plan.tp, self.tp_rank)
        return int(part.stop - part.start)
