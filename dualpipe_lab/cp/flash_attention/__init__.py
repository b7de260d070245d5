"""FlashAttention-2 in plain torch: attention tile by tile, without a matrix of scores, forward and backward.

Chapter: book/cp/flash-attention.  In: queries, keys, values.  Out: softmax(scale Q K^T) V, and the gradients.
              saved for the backward      read and written per pass          products of s x s x d
  naive       Q, K, V and s x s weights   s^2                                2 forward, 4 backward
  tiled       Q, K, V, O and s numbers    s^2 d / tile, a tile at a time      2 forward, 5 backward (S once more)
with s positions and head size d; per batch and head.  Activations grow with s instead of its square.
Elsewhere: `torch.nn.functional.scaled_dot_product_attention`; the flash-attn package.  `is_causal` of torch aligns the
first query with the first key (`top_left`), flash-attn from 2.1 the last with the last (`bottom_right`).
Source: Dao 2023 (arXiv 2307.08691), algorithms 1 and 2.
"""

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe_lab.cp.flash_attention.heads import check_heads, default_scale
from dualpipe_lab.cp.flash_attention.kernel import FlashTiles, Kernel

Causal: TypeAlias = Literal["top_left", "bottom_right"]

__all__ = ["Causal", "FlashTiles", "Kernel", "flash_attention"]


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: Causal | None = None,
    scale: float | None = None,
    tiles: FlashTiles | None = None,
) -> Tensor:
    """Attention of queries to keys; differentiable.  Returns `out_BHSD`.

    Args:
        q: `q_BHSD`; B: batch, H: query heads, S: positions, D: size of a head.
        k: `k_BKTD`; K: key and value heads, of which each serves H / K query heads in a row; T: positions of keys.
        v: `v_BKTD`.
        causal: which corner of the scores the first hidden diagonal starts from, where S and T differ; None: see all.
            A query that sees no key gets zeros, and passes no gradient.
        scale: of the scores (default: D ** -0.5).
        tiles: how many queries and keys a tile holds; the result does not depend on it but for rounding.

    Raises:
        ValueError: shapes that do not fit together, or an unknown `causal`.
    """
    check_heads(q, k, v)
    if causal not in (None, "top_left", "bottom_right"):
        raise ValueError(f"causal is None, top_left or bottom_right, got {causal!r}")
    offset = None if causal is None else k.shape[2] - q.shape[2] if causal == "bottom_right" else 0
    scale = default_scale(q) if scale is None else scale
    out: Tensor = _FlashAttention.apply(q, k, v, offset, scale, tiles or FlashTiles())
    return out


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, q: Tensor, k: Tensor, v: Tensor, offset: int | None, scale: float, tiles: FlashTiles
    ) -> Tensor:
        out, lse = tiles.forward(q, k, v, offset, scale)
        out = out.to(q.dtype)
        context.save_for_backward(q, k, v, out, lse)
        context.offset, context.scale, context.tiles = offset, scale, tiles
        return out

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = context.saved_tensors
        grads = context.tiles.backward(grad, q, k, v, out, lse, context.offset, context.scale)
        return (*(found.to(x.dtype) for found, x in zip(grads, (q, k, v), strict=True)), None, None, None)
