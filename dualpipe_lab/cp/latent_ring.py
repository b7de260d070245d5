"""`LatentRing`: latents travel round the ring; each rank unfolds keys and values of a block that arrives.

Chapter: book/tp/latent-attention.  In: this rank's queries and latents, the weight that unfolds.  Out: its output.
The hops are those of `ring_attention`.  A position of a block is r_kv + d_position numbers instead of
2 a max(d_content + d_position, d_value), for a heads on this rank.  The price: every block that a rank attends to is
unfolded there, in both directions, where `ring_attention` unfolds the rank's own block once.
dW stays: it has this rank's queries and all latents, where the dW of `ring_attention` has all queries and this rank's
latents.  Both are summands of the same sum over the ranks.
Elsewhere: Megatron and Transformer Engine send keys and values.
Source: DeepSeek-AI 2024 (arXiv 2405.04434), section 2.1.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from dualpipe_lab.comm.groups import Group
from dualpipe_lab.cp.flash_attention import FlashTiles, Grads, Kernel
from dualpipe_lab.cp.layouts import SequenceLayout
from dualpipe_lab.cp.ring import Ring
from dualpipe_lab.cp.ring_attention import BlockAttention, RingAttention, ring_attention
from dualpipe_lab.cp.sequence import check_local_shard
from dualpipe_lab.tp.latent_sizes import LatentSizes

Sends: TypeAlias = Literal["auto", "latents", "keys"]
SENDS: tuple[Sends, ...] = ("auto", "latents", "keys")


@dataclass(frozen=True)
class LatentRing:
    """Ring attention as the `attend` of a layer; of latent attention it sends latents where they are shorter.

    Args:
        layout: which positions each rank holds.
        group: the ranks of the ring.
        sends: what travels for latent attention: `latents`, `keys` (and values), or `auto`, the one with fewer numbers
            per position.
        kernel: attention of one block to another (default: `FlashTiles()`).

    Raises:
        ValueError: another word for `sends`.
    """

    layout: SequenceLayout
    group: Group | None = None
    sends: Sends = "auto"
    kernel: Kernel | None = None

    def __post_init__(self) -> None:
        if self.sends not in SENDS:
            raise ValueError(f"what travels round the ring is one of {', '.join(SENDS)}, got {self.sends!r}")

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return `out_BHSD` of queries, keys and values; they travel."""
        return ring_attention(q, k, v, self.layout, group=self.group, kernel=self.kernel)

    def takes_latents(self, sizes: LatentSizes, num_heads: int) -> bool:
        """Return whether the ring sends latents instead of keys and values, for a layer with so many local heads."""
        return self.sends == "latents" or (self.sends == "auto" and sizes.is_shorter(num_heads))

    def of_latents(self, q: Tensor, latents: Tensor, unfold: Tensor, sizes: LatentSizes) -> Tensor:
        """Attend, causally, from this rank's queries to the keys that the latents of all ranks unfold to.

        Args:
            q: `q_BHSK`, this rank's positions of the layout; K: content, then rotated position.
            latents: `c_BSC`, of the same positions: the latent after its norm, then the rotated key position.
            unfold: `W_OR`: for each head of this rank the rows of its content, then those of its values; R: the latent.
            sizes: K, C, R, and V, the features of a value.

        Returns:
            `out_BHSV`.

        Raises:
            ValueError: shapes that do not fit together, a shard whose length is not what the layout gives this rank, or
                a layout for another number of ranks.
        """
        _check_shapes(q, latents, unfold, sizes)
        ring, kernel = Ring(self.group), _Unfolding(sizes, self.kernel or FlashTiles())
        check_local_shard(q, self.layout, ring, 2)
        check_local_shard(latents, self.layout, ring, 1)
        block = BlockAttention(ring, self.layout, True, sizes.key**-0.5, kernel, sizes.value, "C", num_travelling=1)
        out: Tensor = RingAttention.apply(block, q, latents.unsqueeze(1), unfold)
        return out


@dataclass(frozen=True)
class _Unfolding:
    """A kernel on latents `c_B1SC` and W `W_OR`: it unfolds them to keys and values of one width for `kernel`."""

    sizes: LatentSizes
    kernel: Kernel

    def forward(self, q: Tensor, c: Tensor, unfold: Tensor, offset: int | None, scale: float) -> tuple[Tensor, Tensor]:
        """Return `out_BHSV` and `lse_BHS`."""
        out, lse = self.kernel.forward(self._filled(q), *self._keys_and_values(c, unfold), offset, scale)
        return out[..., : self.sizes.value], lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        c: Tensor,
        unfold: Tensor,
        out: Tensor,
        lse: Tensor,
        offset: int | None,
        scale: float,
    ) -> Grads:
        """Return dQ, dC `dc_B1SC` and dW.

        dc = W^T [dk_content, dv],  dk_position is summed over the heads,  dW = [dk_content, dv]^T c.
        """
        k, v = self._keys_and_values(c, unfold)  # again, so that no block's keys and values are kept
        grad, q, out = (self._filled(x) for x in (grad, q, out))
        dq, dk, dv = self.kernel.backward(grad, q, k, v, out, lse, offset, scale)
        content, rank = self.sizes.content, self.sizes.kv_rank
        dheads = torch.cat((dk[..., :content], dv[..., : self.sizes.value]), -1).transpose(1, 2).flatten(2).to(c.dtype)
        dposition = dk[..., content : self.sizes.key].sum(1)
        dc = torch.cat(((dheads @ unfold).to(dposition.dtype), dposition), -1)
        dw = dheads.flatten(0, 1).T @ c[..., :rank].flatten(0, 2)
        return dq[..., : self.sizes.key], dc.unsqueeze(1), dw

    def _keys_and_values(self, c: Tensor, unfold: Tensor) -> tuple[Tensor, Tensor]:
        """Return k and v, each `_BHSD`: [k_content, v] = W c,  k = [k_content, k_position]."""
        latent, position = c.split([self.sizes.kv_rank, self.sizes.position], -1)
        heads = linear(latent[:, 0], unfold).unflatten(-1, (-1, self.sizes.content + self.sizes.value)).transpose(1, 2)
        content, v = heads.split([self.sizes.content, self.sizes.value], -1)
        k = torch.cat((content, position.expand(-1, content.shape[1], -1, -1)), -1)
        return self._filled(k), self._filled(v)

    def _filled(self, x: Tensor) -> Tensor:
        """Fill the features up with zeros to the size of keys, or of values where these have more."""
        return pad(x, (0, max(self.sizes.key, self.sizes.value) - x.shape[-1]))


def _check_shapes(q: Tensor, latents: Tensor, unfold: Tensor, sizes: LatentSizes) -> None:
    sizes.check()
    shapes = [tuple(tensor.shape) for tensor in (q, latents, unfold)]
    fits = [len(shape) for shape in shapes] == [4, 3, 2] and q.shape[0] == latents.shape[0]
    if not fits or (q.shape[3], latents.shape[2], unfold.shape[1]) != (sizes.key, sizes.cached, sizes.kv_rank):
        raise ValueError(
            f"with {sizes}, queries are (batch, heads, positions, {sizes.key}), latents (batch, positions, "
            f"{sizes.cached}) and the weight that unfolds (rows, {sizes.kv_rank}), got {shapes}"
        )
    rows = q.shape[1] * (sizes.content + sizes.value)
    if len(unfold) != rows:
        raise ValueError(
            f"{q.shape[1]} heads x ({sizes.content} + {sizes.value}) features of content and value take {rows} rows of "
            f"the weight that unfolds, got {len(unfold)}; give it the heads of the queries"
        )
