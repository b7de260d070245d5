"""Causal attention of a rank's local heads, with its backward written out; groups of query heads share a key head.

Chapter: book/tp/gqa.  In: q_BHSK, k_BGSK, v_BGSV.  Out: o_BHSV; query head i uses key head i // (H / G).
  s = q k^T / sqrt(K)    p = softmax of s over the earlier tokens and the token itself    o = p v
  dv = p^T do    dp = do v^T    ds = p (dp - sum over keys of dp p)    dq = ds k / sqrt(K)    dk = ds^T q / sqrt(K)
dk and dv are sums over the query heads of the group.  Only q, k and v are kept; the backward recomputes p.
Elsewhere: torch `scaled_dot_product_attention(is_causal=True, enable_gqa=True)`.
Source: Ainslie et al. 2023 (arXiv 2305.13245), section 2.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention: o_BHSV of q_BHSK, k_BGSK and v_BGSV; G key heads divide H query heads."""
    out: Tensor = CausalAttention.apply(q, k, v)
    return out


class CausalAttention(torch.autograd.Function):
    """Softmax attention; the query heads of a group are stacked, so that each key head needs one matrix product."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        grouped = _grouped(q, k)
        return (_weights(grouped, k) @ v).view(*q.shape[:-1], v.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        grouped, grad = _grouped(q, k), _grouped(grad, k)
        p = _weights(grouped, k)
        dv = p.transpose(-1, -2) @ grad
        dp = grad @ v.transpose(-1, -2)
        ds = p.mul_(dp - (dp * p).sum(-1, keepdim=True)).mul_(scale)
        return (ds @ k).view(q.shape), ds.transpose(-1, -2) @ grouped, dv


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    """Return q_BHSK as _BGRK: for every key head, the tokens of its query heads stacked."""
    return q.reshape(*k.shape[:2], -1, q.shape[-1])


def _weights(grouped: Tensor, k: Tensor) -> Tensor:
    """Return p_BGRS, the softmax weight of each key for each query."""
    num_tokens = k.shape[2]
    scores = (grouped @ k.transpose(-1, -2)).mul_(k.shape[-1] ** -0.5)
    later = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=k.device).triu(1)
    scores.view(*scores.shape[:2], -1, num_tokens, num_tokens).masked_fill_(later, -torch.inf)
    return torch.softmax(scores, -1)
