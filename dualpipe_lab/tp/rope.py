"""Rotary positions: pairs of features are rotated by an angle proportional to the token's position.

Chapter: book/tp/gqa.  In: x_BHSK, positions_S.  Out: the same shape.
  forward    (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)     angle = position * base^(-2 i / K) for pair i
  backward   the rotation by the opposite angle
Positions count from the start of the full sequence, also on a rank that holds a shard of it.  No message is sent.
Pairs are feature i and i + K / 2, as in Llama's published weights.
Elsewhere: Megatron `apply_rotary_pos_emb`.  Source: Su et al. 2021 (arXiv 2104.09864), section 3.4.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe_lab.tp.rope_scaling import Scaling


def rope_cos_sin(
    positions: Tensor, head_size: int, base: float, dtype: torch.dtype, scaling: Scaling | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each `_SK/2`, of the rotary angles at these positions; `scaling` stretches them.

    A scaling that sharpens attention multiplies both, so that `apply_rope` makes features longer too.

    Raises:
        ValueError: the head size is odd.
    """
    if head_size % 2:
        raise ValueError(f"rotary positions turn pairs of features, got head_size {head_size}; use an even one")
    powers = torch.arange(0, head_size, 2, dtype=torch.float64, device=positions.device) / head_size
    steps = base**-powers
    if scaling is not None:
        steps = steps * steps.new_tensor(scaling.factors(base, head_size))
    angles = positions.to(torch.float64)[:, None] * steps
    length = 1.0 if scaling is None else scaling.rotated_factor
    return (angles.cos() * length).to(dtype), (angles.sin() * length).to(dtype)


def apply_rope(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the feature pairs of x_BHSK by the angles of its tokens, which `rope_cos_sin` computes."""
    out: Tensor = _ApplyRope.apply(x, cosines, sines)
    return out


class _ApplyRope(torch.autograd.Function):
    """A rotation; its backward is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _rotated(x, cosines, sines)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        return _rotated(grad, cosines, -sines), None, None


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)
