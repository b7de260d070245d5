"""`LatentTable`: what latent attention keeps for the backward, tensor by tensor.

Chapter: book/tp/latent-attention.  In: as `LayerTable`, for a model with latents.  Out: named bytes.
With T tokens on the rank, T' = T / tp under sequence parallelism and T without, a' = a / tp heads, b bytes per number:
  input           T' h b, once for both down-projections; without a latent of queries a gathered one of T h b too,
                  where it is not gathered again
  latents         T' (r_q + r_kv + d_position) b, what the down-projections give, and the scales of two norms
  normalised      T' (r_q + r_kv) b, the inputs of the up-projections, gathered again in the backward, else T
  angles          S d_position b: of the position features alone
  heads           T a' (2 (d_content + d_position) + d_value) b; this library's values are a view of what is unfolded,
                  content of keys included: T a' d_content b more
  output          T a' d_value b
Along cp latents travel where they are shorter, and stay in place of keys and values; else values are padded to keys.
Source: DeepSeek-AI 2024 (arXiv 2405.04434), section 2.1; the rules of Megatron with its fused rotation of latents.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.plan.kept_tensors import KeptTensor, LayerTable
from dualpipe_lab.tp.latent_sizes import LatentSizes


@dataclass(frozen=True)
class LatentTable(LayerTable):
    """A layer of a V3-style model with a dense network; its attention has latents, or heads as that of a Llama.

    >>> from dualpipe_lab.plan import LAB, Plan
    >>> config = V3MoEConfig(latent=LatentSizes(), hidden_size=7168, num_heads=128)
    >>> table = LatentTable(config, Plan(precision="bfloat16"), LAB, num_rows=1, length=4096)
    >>> {tensor.name: tensor.num_bytes // 2**20 for tensor in table.attention()}["queries"]
    192
    """

    @property
    def sparse(self) -> V3MoEConfig:
        """The model, which has experts in other layers."""
        assert isinstance(self.model, V3MoEConfig)
        return self.model

    @property
    def attention_weights(self) -> dict[str, int]:
        """Elements of the weights of attention's products on this rank."""
        sizes, heads = self.sparse.latent, self._sizes.num_heads // self.plan.tp
        if sizes is None:
            return super().attention_weights
        queries = {} if sizes.query_rank is None else {"queries down": self.hidden * sizes.query_rank}
        return {
            **queries,
            "queries up": heads * sizes.key * (sizes.query_rank or self.hidden),
            "keys and values down": self.hidden * sizes.cached,
            "keys and values up": heads * (sizes.content + sizes.value) * sizes.kv_rank,
            "attention's output": heads * sizes.value * self.hidden,
        }

    def attention(self) -> Iterator[KeptTensor]:
        """Yield the tensors of attention."""
        sizes = self.sparse.latent
        if sizes is None:
            yield from super().attention()
            return
        yield KeptTensor("attention's input", self.boundary_bytes)
        yield from self._queries(sizes)
        norm = self.local_tokens * (sizes.cached * self.element + self.scale)
        yield KeptTensor("latent of keys and values", norm)
        yield from self._heads(sizes)

    def _queries(self, sizes: LatentSizes) -> Iterator[KeptTensor]:
        """Yield what is kept before the up-projection of queries."""
        if sizes.query_rank is None:
            gathered = self.kept_tokens > self.local_tokens
            yield KeptTensor("queries' input", self.input_bytes if gathered else 0)
            return
        yield KeptTensor("latent of queries", self.local_tokens * (sizes.query_rank * self.element + self.scale))
        yield KeptTensor("latent of queries, normalised", self.kept_tokens * sizes.query_rank * self.element)

    def _heads(self, sizes: LatentSizes) -> Iterator[KeptTensor]:
        """Yield what is kept from the up-projections to the output."""
        heads = self._sizes.num_heads // self.plan.tp
        each = heads * self.num_tokens * self.element
        travels = self.plan.cp > 1 and self.rules.sends_latents
        pads = travels and not sizes.is_shorter(heads)  # a ring takes values of the size of keys
        yield KeptTensor("queries", each * sizes.key)
        if travels and not pads:
            yield KeptTensor("latents that travel", self.num_tokens * sizes.cached * self.element)
        else:
            rest = sizes.key if pads else sizes.value + (sizes.content if self.rules.keeps_unfolded else 0)
            yield KeptTensor("latent, normalised", self.kept_tokens * sizes.kv_rank * self.element)
            yield KeptTensor("keys and values", each * (sizes.key + rest))
        if self.rules.keeps_angles:
            yield KeptTensor("angles", self.length * sizes.position * self.element)
        yield from self.core(heads)
        yield from self.output(each * sizes.value, each * (sizes.key if pads else sizes.value))
