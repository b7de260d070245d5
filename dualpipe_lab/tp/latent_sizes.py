"""`LatentSizes`: the sizes of latent attention, and what follows from them; needs no torch.

Chapter: book/tp/latent-attention.  In: sizes.  Out: checked sizes, numbers of parameters.
  weights      h (r_q + r_kv + d_position) + r_q + r_kv on every rank: down-projections and the two norms
               a (r_q (d_content + d_position) + r_kv (d_content + d_value) + h d_value) for a heads
Elsewhere: `q_lora_rank`, `kv_lora_rank`, `qk_nope_head_dim`, `qk_rope_head_dim`, `v_head_dim` of DeepSeek's files.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of latent attention; the defaults are DeepSeek-V3's.

    Attributes:
        query_rank: of the queries' latent; None for queries straight from x, as in DeepSeek-V2-Lite.
        kv_rank: of the latent of keys and values.
        content, position: features of a query or key that are compared without, and with a rotation.
        value: features of a value.

    >>> LatentSizes().cached, LatentSizes().key
    (576, 192)
    """

    query_rank: int | None = 1536
    kv_rank: int = 512
    content: int = 128
    position: int = 64
    value: int = 128

    @property
    def key(self) -> int:
        """Features of a query or of a key."""
        return self.content + self.position

    @property
    def cached(self) -> int:
        """Numbers per token that a cache keeps."""
        return self.kv_rank + self.position

    def check(self) -> None:
        """Refuse sizes below 1 and an odd number of position features; ValueError names them."""
        if min(self.query_rank or 1, self.kv_rank, self.content, self.value) < 1 or self.position < 2:
            raise ValueError(f"sizes of latent attention count from 1, and 2 position features, got {self}")
        if self.position % 2:
            raise ValueError(f"rotary positions turn pairs of features, got position={self.position}; use an even one")

    def replicated(self, hidden_size: int) -> tuple[int, ...]:
        """Return the sizes of the weights that every rank holds, in the order of the layer: W_qd, norm, W_kvd, norm.

        >>> LatentSizes().replicated(7168)
        (11010048, 1536, 4128768, 512)
        """
        queries = () if self.query_rank is None else (hidden_size * self.query_rank, self.query_rank)
        return (*queries, hidden_size * self.cached, self.kv_rank)

    def parameters(self, hidden_size: int, num_heads: int) -> int:
        """Return the number of parameters of a layer's attention.

        >>> LatentSizes().parameters(7168, 128)
        187107328
        """
        queries, unfolded = (self.query_rank or hidden_size) * self.key, self.kv_rank * (self.content + self.value)
        return sum(self.replicated(hidden_size)) + num_heads * (queries + unfolded + hidden_size * self.value)

    def is_shorter(self, num_heads: int) -> bool:
        """Return whether a token's latent has fewer numbers than its keys and values in `num_heads` heads.

        >>> [LatentSizes().is_shorter(heads) for heads in (1, 2, 128)]
        [False, True, True]
        """
        return self.cached < 2 * num_heads * max(self.key, self.value)
