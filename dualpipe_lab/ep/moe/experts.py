"""Experts as grouped products: SwiGLU with the weights of each row's expert, forward, input gradient, weight gradient.

Chapter: book/ep/smoe.  In: `rows_RD` in the order of the experts, and rows per expert.  Out: `y_RD`.
  y = (silu(a) * u) W_d^T      a = x W_g^T,  u = x W_u^T, with the weights of the row's expert
  I   dh = dy W_d,  du = dh silu(a),  da = dh u s(a) (1 + a - silu(a)),  dx = da W_g + du W_u
  W   dW_d = dy^T h,  dW_g = da^T x,  dW_u = du^T x, over the rows of each expert; zeros where it has none
I and W are separate functions, so that other work may run between them; each is three grouped products of 2 R h f
operations.
Elsewhere: torch `grouped_mm`; Megatron `GroupedMLP`; torchtitan `GroupedExperts`.
Source: Shazeer 2020 (arXiv 2002.05202), section 2, for the gate.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class SwiGLUWeights(NamedTuple):
    """The weights of this rank's experts, `gate_EFD`, `up_EFD`, `down_EDF`, or their gradients."""

    gate: Tensor
    up: Tensor
    down: Tensor


class SavedForInputGrad(NamedTuple):
    """Tensors that the forward saves for I: `rows_RD`, `a_RF`, `u_RF`, and rows per expert."""

    rows: Tensor
    a: Tensor
    u: Tensor
    counts: tuple[int, ...]


class SavedForWeightGrad(NamedTuple):
    """Tensors that I saves for the weight gradient: inputs and output gradients of the three products."""

    rows: Tensor
    da: Tensor
    du: Tensor
    inner: Tensor
    grad: Tensor
    counts: tuple[int, ...]


@torch.no_grad()
def experts_forward(rows: Tensor, counts: Sequence[int], weights: SwiGLUWeights) -> tuple[Tensor, SavedForInputGrad]:
    """F: return `y_RD` and the tensors that the input gradient needs.

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
    return y, SavedForInputGrad(rows, a, u, tuple(counts))


@torch.no_grad()
def experts_input_grad(
    grad: Tensor, weights: SwiGLUWeights, saved: SavedForInputGrad
) -> tuple[Tensor, SavedForWeightGrad]:
    """I: return `dx_RD` for the output gradient `grad_RD`, and the tensors that the weight gradient needs."""
    rows, a, u, counts = saved
    sigmoid = torch.sigmoid(a)
    silu = a * sigmoid
    dh = grouped_product(grad, weights.down.mT, counts)
    du = dh * silu
    da = dh.mul_(u).mul_(sigmoid.mul_((a - silu).add_(1)))  # s(a) (1 + a (1 - s(a))) = s(a) (1 + a - silu(a))
    dx = grouped_product(da, weights.gate.mT, counts)
    dx = grouped_product(du, weights.up.mT, counts, add_to=dx)
    return dx, SavedForWeightGrad(rows, da, du, silu.mul_(u), grad, counts)


@torch.no_grad()
def experts_weight_grad(saved: SavedForWeightGrad) -> SwiGLUWeights:
    """W: return the gradients of the weights; those of an expert without rows are zeros."""
    return SwiGLUWeights(
        grouped_weight_grad(saved.da, saved.rows, saved.counts),
        grouped_weight_grad(saved.du, saved.rows, saved.counts),
        grouped_weight_grad(saved.grad, saved.inner, saved.counts),
    )


def grouped_product(rows: Tensor, weights: Tensor, counts: Sequence[int], add_to: Tensor | None = None) -> Tensor:
    """Multiply the rows of each expert by its matrix, y = x W^T: `y_RO`.

    Args:
        rows: `x_RI` in the order of the experts.
        weights: `weights_EOI`.
        counts: rows of each expert; some may be 0.
        add_to: a `y_RO` to which the product is added, in place.
    """
    y = rows.new_empty(len(rows), weights.shape[1]) if add_to is None else add_to
    for product, x, weight in zip(y.split(list(counts)), rows.split(list(counts)), weights, strict=True):
        if len(x):
            torch.addmm(product, x, weight.t(), beta=0 if add_to is None else 1, out=product)  # beta 0: not read
    return y


def grouped_weight_grad(grad: Tensor, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Return dW = dy^T x over the rows of each expert, `dw_EOI`, for `grad_RO` and `x_RI`."""
    dw = rows.new_zeros(len(counts), grad.shape[1], rows.shape[1])
    for matrix, dy, x in zip(dw, grad.split(list(counts)), rows.split(list(counts)), strict=True):
        if len(x):
            torch.mm(dy.t(), x, out=matrix)
    return dw
