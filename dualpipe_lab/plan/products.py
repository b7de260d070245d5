"""`Product`, `layer_work`, `head_work`: the matrix products of a layer on one rank, and the bytes that the rest moves.

In: a model, a plan, the tokens of a microbatch.  Out: products, pairs, bytes.
With T tokens on the rank, T' = T / tp under sequence parallelism and T without, b bytes per number:
  product       2 T m n FLOPs forward; its backward has two of that size: of the input (I) and of the weight (W)
  attention     2 (d_k + d_v) FLOPs per head and pair of a query and a key that it sees; a causal mask shows S (S+1) / 2
                pairs of a sequence, and the backward of a kernel that keeps no scores takes 5 products instead of 2
  experts       k rows of a token at the experts of the group of ep, each T k rows on average; none are dropped
  elementwise   norms 4 T' h b, residual sums 6 T' h b, rotations 2 T (a + a_kv) d b, activations 3 or 2 T f b,
                rows to experts and back 4 T k h b; about twice as much backward
Model FLOPs leave out what is computed again.  Some count all S^2 pairs: both counts are here, by name.
Elsewhere: Megatron `num_floating_point_operations`; torchtitan's `get_num_flop_per_token`, which counts S^2.
Source: Narayanan et al. 2021 (arXiv 2104.04473), appendix.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

from dualpipe_lab.cp.layouts import critical_path, make_layout, visible_pairs
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.plan.fields import PlanFields
from dualpipe_lab.plan.gpt_config import GptConfig
from dualpipe_lab.plan.layer_traffic import ELEMENT_BYTES
from dualpipe_lab.plan.states import AnyModel, sizes_of
from dualpipe_lab.sharding import shard_slice

_LAYER_KERNELS, _EXPERT_KERNELS, _HEAD_KERNELS = 6, 6, 4  # norms, sums, rotation, activation; routing; the loss
_LOSS_BYTES = 12, 8  # per logit, forward and backward: numbers of 32 bits are read and written


class Product(NamedTuple):
    """A product of a (rows, inner) and an (inner, outer) matrix, a number of times.

    >>> Product("head", rows=2, inner=3, outer=4).flops
    48
    """

    name: str
    rows: int
    inner: int
    outer: int
    times: int = 1

    @property
    def flops(self) -> int:
        """FLOPs of all of them: an addition and a multiplication each."""
        return 2 * self.rows * self.inner * self.outer * self.times


@dataclass(frozen=True)
class Work:
    """What one rank computes in the forward of a layer, or of the model's end.

    Attributes:
        products: matrix products with weights.
        core_flops: of attention between its products, on the slowest rank of cp.
        forward_bytes, backward_bytes: that elementwise work reads and writes.
        num_kernels: of elementwise work in the forward; twice as many backward.
    """

    products: tuple[Product, ...] = ()
    core_flops: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    num_kernels: int = 0

    def __add__(self, other: "Work") -> "Work":
        """Return the work of both, one after the other."""
        return Work(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def flops(self) -> int:
        """FLOPs of the forward."""
        return self.core_flops + sum(product.flops for product in self.products)


@dataclass(frozen=True)
class RankWork:
    """The work of one rank, for microbatches of one shape.

    Attributes:
        model, plan: what is trained, and how.
        num_rows: sequences of a microbatch.
        sequence_length: tokens of a full sequence.
        splits_routing: the ranks of tp share out the tokens that go to experts, and the experts of their rank of ep;
            else each of them routes all tokens and has all of these experts.

    >>> gpt = GptConfig(51200, 12288, 96, 96)
    >>> work = RankWork(gpt, PlanFields(), num_rows=1, sequence_length=2048)
    >>> sum(product.flops for product in work.layer(0).products) == 24 * 2048 * 12288**2
    True
    """

    model: AnyModel
    plan: PlanFields
    num_rows: int
    sequence_length: int
    splits_routing: bool = False

    @property
    def num_tokens(self) -> int:
        """T, the tokens of a microbatch on this rank; of cp, the most that a rank has."""
        return self.num_rows * -(-self.sequence_length // self.plan.cp)

    def layer(self, number: int) -> Work:
        """Return the work of a layer's forward."""
        is_sparse = self._is_sparse(number)
        network = list(self._experts() if is_sparse else self._network(self.sizes.ffn_size))
        forward = self._norm_bytes + self._rotation_bytes + self._network_bytes(is_sparse)
        num_kernels = _LAYER_KERNELS + _EXPERT_KERNELS * is_sparse
        return Work((*self._attention(), *network), self._core_flops, forward, 2 * forward, num_kernels)

    def again(self, number: int, parts: frozenset[str] = frozenset()) -> Work:
        """Return what the backward repeats of a layer's forward.

        Where the plan recomputes layers, all of it, of overlapped experts only what is before them; else these parts.
        """
        if not self.plan.recompute:
            return self._again_of(number, parts)
        if not (self.plan.overlap and self._is_sparse(number)):
            return self.layer(number)
        products = [*self._attention(), self._router()]
        return Work(tuple(products), self._core_flops, self._norm_bytes + self._rotation_bytes, 0, _LAYER_KERNELS)

    def _again_of(self, number: int, parts: frozenset[str]) -> Work:
        """Return the work of parts of a layer, by the names of `KeepRules.recomputes`."""
        is_sparse, element = self._is_sparse(number), self._element
        ups = tuple(one for one in self._attention() if one.name in ("queries", "keys and values"))
        found = {
            "core_attn": Work((), self._core_flops),
            "layernorm": Work((), 0, 4 * self._shared * self.sizes.hidden_size * element, 0, 2),
            "mla_up_proj": Work(ups, 0, self._rotation_bytes if ups else 0, 0, len(ups) // 2),
        }
        if is_sparse:
            assert isinstance(self.model, V3MoEConfig)
            found["moe_act"] = Work((), 0, 3 * self.slots * self.model.expert_ffn_size * element, 0, 1)
        else:
            found["mlp"] = Work(tuple(self._network(self.sizes.ffn_size)), 0, self._network_bytes(False), 0, 1)
        return sum((work for part, work in found.items() if part in parts), Work())

    def core_products(self, is_forward: bool) -> tuple[Product, ...]:
        """Return the products of unfused attention, which computes all pairs: scores and values, or their gradients."""
        keys, latent, config = self.sequence_length, getattr(self.model, "latent", None), self.sizes
        widths = (config.size_of_head,) * 2 if latent is None else (latent.key, latent.value)
        times, queries = self.num_rows * config.num_heads // self.plan.tp, -(-keys // self.plan.cp)
        scores = Product("scores", queries, widths[0], keys, times)
        values = Product("values", queries, keys, widths[1], times)
        return (scores, values) if is_forward else (scores, scores, values, values)

    def score_bytes(self, is_forward: bool) -> int:
        """Return what softmax and dropout of unfused attention read and write: 1 byte of a mask, and numbers."""
        numbers = 4 if is_forward else 5  # softmax: 2, or 3 with its output and two gradients; dropout: 2
        scores = self.num_rows * -(-self.sequence_length // self.plan.cp) * self.sequence_length
        return scores * (self.sizes.num_heads // self.plan.tp) * (numbers * self._element + 1)

    def head(self) -> Work:
        """Return the work of the last norm, the head and the loss."""
        width = self._shard(self.sizes.vocabulary_size)
        norm = 4 * self._shared * self.sizes.hidden_size * self._element
        logits = self.num_tokens * width
        products = (Product("head", self.num_tokens, self.sizes.hidden_size, width),)
        return Work(products, 0, norm + _LOSS_BYTES[0] * logits, 2 * norm + _LOSS_BYTES[1] * logits, _HEAD_KERNELS)

    def second(self) -> Work:
        """Return the work of what predicts a second token: projection, layer, head."""
        return Work((self._projection,)) + self.layer(self.sizes.num_layers) + self.head()

    def second_again(self) -> Work:
        """Return what recomputation repeats of that: all but the head."""
        return Work((self._projection,)) + self.again(self.sizes.num_layers)

    @property
    def _projection(self) -> Product:
        hidden = self.sizes.hidden_size
        return Product("projection", self.num_tokens, 2 * hidden, self._shard(hidden))

    def _is_sparse(self, number: int) -> bool:
        return isinstance(self.model, V3MoEConfig) and number >= self.model.num_dense_layers

    def _attention(self) -> Iterator[Product]:
        return self._heads() if getattr(self.model, "latent", None) is None else self._latents()

    def _heads(self) -> Iterator[Product]:
        config, tokens, tp = self.sizes, self.num_tokens, self.plan.tp
        heads, key_heads = config.num_heads // tp, max(config.num_kv_heads // tp, 1)
        size, hidden = config.size_of_head, config.hidden_size
        yield Product("heads", tokens, hidden, (heads + 2 * key_heads) * size)
        yield Product("attention's output", tokens, heads * size, hidden)

    def _latents(self) -> Iterator[Product]:
        assert isinstance(self.model, V3MoEConfig) and self.model.latent is not None  # noqa: PT018
        sizes, hidden, tokens = self.model.latent, self.model.hidden_size, self.num_tokens
        heads = self.model.num_heads // self.plan.tp
        if sizes.query_rank is not None:
            yield Product("query latent", self._shared, hidden, sizes.query_rank)
        yield Product("key latent", self._shared, hidden, sizes.cached)
        yield Product("queries", tokens, sizes.query_rank or hidden, heads * sizes.key)
        yield Product("keys and values", tokens, sizes.kv_rank, heads * (sizes.content + sizes.value))
        yield Product("attention's output", tokens, heads * sizes.value, hidden)

    def _network(self, width: int) -> Iterator[Product]:
        hidden, inner = self.sizes.hidden_size, self._shard(width)
        into = 1 if isinstance(self.model, GptConfig) else 2
        yield Product("network's input", self.num_tokens, hidden, into * inner)
        yield Product("network's output", self.num_tokens, inner, hidden)

    def _router(self) -> Product:
        assert isinstance(self.model, V3MoEConfig)
        return Product("router", self._routed, self.model.hidden_size, self.model.num_experts)

    def _experts(self) -> Iterator[Product]:
        assert isinstance(self.model, V3MoEConfig)
        config = self.model
        num_here = -(-config.num_experts // (self.plan.ep * (self.plan.tp if self.splits_routing else 1)))
        each = -(-self.slots // num_here)
        yield self._router()
        yield Product("experts' input", each, config.hidden_size, 2 * config.expert_ffn_size, num_here)
        yield Product("experts' output", each, config.expert_ffn_size, config.hidden_size, num_here)
        if config.num_shared_experts:
            yield from self._network(config.shared_ffn_size)

    @property
    def _core_flops(self) -> int:
        config, heads = self.sizes, self.sizes.num_heads // self.plan.tp
        latent = getattr(self.model, "latent", None)
        widths = 2 * config.size_of_head if latent is None else latent.key + latent.value
        return 2 * self.num_rows * causal_pairs(self.sequence_length, self.plan.cp, self.plan.layout) * heads * widths

    @property
    def _norm_bytes(self) -> int:
        return 10 * self._shared * self.sizes.hidden_size * self._element

    @property
    def _rotation_bytes(self) -> int:
        config, tp = self.sizes, self.plan.tp
        if isinstance(self.model, GptConfig):
            return 0
        heads = config.num_heads // tp + max(config.num_kv_heads // tp, 1)
        return 2 * self.num_tokens * heads * config.size_of_head * self._element

    def _network_bytes(self, is_sparse: bool) -> int:
        tokens, element = self.num_tokens, self._element
        if not is_sparse:
            return (2 if isinstance(self.model, GptConfig) else 3) * tokens * self._shard(self.sizes.ffn_size) * element
        assert isinstance(self.model, V3MoEConfig)
        shared = 3 * tokens * self._shard(self.model.shared_ffn_size) if self.model.num_shared_experts else 0
        routed = self.slots * (4 * self.model.hidden_size + 3 * self.model.expert_ffn_size)
        return (shared + routed) * element

    @property
    def sizes(self) -> LlamaConfig:
        """The sizes of attention, embedding and head."""
        return sizes_of(self.model)

    @property
    def _element(self) -> int:
        return ELEMENT_BYTES[self.plan.precision]

    @property
    def _shared(self) -> int:
        return self.num_tokens // self.plan.tp if self.plan.sequence_parallel else self.num_tokens

    @property
    def _routed(self) -> int:
        """The tokens of a microbatch that this rank routes."""
        return self.num_tokens // self.plan.tp if self.splits_routing else self.num_tokens

    @property
    def slots(self) -> int:
        """Rows at the experts of this rank, with choices spread evenly."""
        assert isinstance(self.model, V3MoEConfig)
        return self._routed * self.model.num_experts_per_token

    def _shard(self, length: int) -> int:
        part = shard_slice(length, self.plan.tp, 0)
        return int(part.stop - part.start)


@lru_cache(maxsize=1024)
def causal_pairs(length: int, num_ranks: int = 1, layout: str = "zigzag") -> int:
    """Return the pairs of a query and a key that the slowest rank of a ring computes for one sequence.

    >>> causal_pairs(8), causal_pairs(8, 2, "zigzag"), causal_pairs(8, 2, "contiguous")
    (36, 18, 26)
    """
    size, rest = divmod(length, num_ranks)
    triangle, others = size * (size + 1) // 2, num_ranks - 1
    if rest or (layout == "zigzag" and size % 2):
        return critical_path(visible_pairs(make_layout(layout, length, num_ranks)))
    return triangle + others * {"contiguous": size * size, "striped": triangle, "zigzag": size * size // 2}[layout]


def model_flops(model: AnyModel, sequence_length: int, causal: bool = True, multi_token: bool = False) -> int:
    """Return the FLOPs of forward and backward of one sequence, without anything that is computed again.

    Args:
        model: what is trained.
        sequence_length: tokens.
        causal: count the pairs that a causal mask shows; else all S^2, as some frameworks do.
        multi_token: with the part that predicts a second token.

    >>> llama3_8b = LlamaConfig(128256, 4096, 14336, 32, 32, 8)
    >>> round(model_flops(llama3_8b, 8192, causal=False) / 8192 / 1e9, 1)  # GFLOP per token
    57.9
    """
    work = RankWork(model, PlanFields(), 1, sequence_length)
    num_layers = work.sizes.num_layers
    units = [work.layer(number) for number in range(num_layers)] + [work.head()]
    units += [work.second()] if multi_token else []
    pairs = 1.0 if causal else 2 * sequence_length / (sequence_length + 1)
    return sum(3 * (unit.flops - unit.core_flops) + round(3 * unit.core_flops * pairs) for unit in units)
