"""Experts as grouped products: SwiGLU with the weights of each row's expert, forward, input gradient, weight gradient.

Chapter: book/ep/smoe.  In: `rows_RD` in the order of the experts, and how many belong to each.  Out: `y_RD`.
  y = (silu(a) * u) W_d^T      a = x W_g^T,  u = x W_u^T, with the weights of the row's expert
  I   dh = dy W_d,  du = dh silu(a),  da = dh u s(a) (1 + a - silu(a)),  dx = da W_g + du W_u
  W   dW_d = dy^T h,  dW_g = da^T x,  dW_u = du^T x, over the rows of each expert; zeros where it has none
I and W are apart, so that something else may run between them; each is three grouped products of 2 R h f operations.
Elsewhere: torch `grouped_mm`; Megatron `GroupedMLP`; torchtitan `GroupedExperts`.
Source: Shazeer 2020 (arXiv 2002.05202), section 2, for the gate.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Weights(NamedTuple):
    """Of the experts of this rank: `gate_EFD`, `up_EFD`, `down_EDF`; or their gradients."""

    gate: Tensor
    up: Tensor
    down: Tensor


class Kept(NamedTuple):
    """What the forward keeps for the input gradient: `rows_RD`, `a_RF`, `u_RF`, and rows per expert."""

    rows: Tensor
    a: Tensor
    u: Tensor
    counts: tuple[int, ...]


class Late(NamedTuple):
    """What the input gradient keeps for the weight gradient: inputs and output gradients of the three products."""

    rows: Tensor
    da: Tensor
    du: Tensor
    inner: Tensor
    grad: Tensor
    counts: tuple[int, ...]


@torch.no_grad()
def experts_forward(rows: Tensor, counts: Sequence[int], weights: Weights) -> tuple[Tensor, Kept]:
    """F: `y_RD`, and what the backward needs.

    Raises:
        ValueError: counts that do not sum to the rows, or are not one for each expert.
    """
    if len(counts) != len(weights.gate) or sum(counts) != len(rows):
        raise ValueError(
            f"grouped products need one number of rows for each of {len(weights.gate)} experts that sum to "
            f"{len(rows)} rows, got {list(counts)}"
        )
    a, u = grouped_product(rows, weights.gate, counts), grouped_product(rows, weights.up, counts)
    y = grouped_product(torch.nn.functional.silu(a) * u, weights.down, counts)
    return y, Kept(rows, a, u, tuple(counts))


@torch.no_grad()
def experts_input_grad(grad: Tensor, weights: Weights, kept: Kept) -> tuple[Tensor, Late]:
    """I: `dx_RD` of `grad_RD`, and what the weight gradient needs."""
    rows, a, u, counts = kept
    sigmoid = torch.sigmoid(a)
    silu = a * sigmoid
    dh = grouped_product(grad, weights.down.mT, counts)
    du = dh * silu
    da = dh.mul_(u).mul_(sigmoid.mul_((a - silu).add_(1)))  # s(a) (1 + a (1 - s(a))) = s(a) (1 + a - silu(a))
    dx = grouped_product(da, weights.gate.mT, counts)
    dx = grouped_product(du, weights.up.mT, counts, add_to=dx)
    return dx, Late(rows, da, du, silu.mul_(u), grad, counts)


@torch.no_grad()
def experts_weight_grad(late: Late) -> Weights:
    """W: the gradients of the weights; those of an expert without rows are zeros."""
    return Weights(
        grouped_weight_grad(late.da, late.rows, late.counts),
        grouped_weight_grad(late.du, late.rows, late.counts),
        grouped_weight_grad(late.grad, late.inner, late.counts),
    )


def grouped_product(rows: Tensor, weights: Tensor, counts: Sequence[int], add_to: Tensor | None = None) -> Tensor:
    """`y_RO`: the rows of each expert times its matrix, y = x W^T.

    Args:
        rows: `x_RI` in the order of the experts.
        weights: `weights_EOI`.
        counts: rows of each expert; some may be 0.
        add_to: a `y_RO` to which the product is added, in place.
    """
    y = rows.new_empty(len(rows), weights.shape[1]) if add_to is None else add_to
    for own, x, weight in zip(y.split(list(counts)), rows.split(list(counts)), weights, strict=True):
        if len(x):
            torch.addmm(own, x, weight.t(), beta=0 if add_to is None else 1, out=own)  # beta 0 does not read `own`
    return y


def grouped_weight_grad(grad: Tensor, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """`dw_EOI`: dW = dy^T x over the rows of each expert, of `grad_RO` and `x_RI`."""
    dw = rows.new_zeros(len(counts), grad.shape[1], rows.shape[1])
    for own, dy, x in zip(dw, grad.split(list(counts)), rows.split(list(counts)), strict=True):
        if len(x):
            torch.mm(dy.t(), x, out=own)
    return dw
