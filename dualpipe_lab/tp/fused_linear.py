"""Several column-parallel weights behind one input, fused into one product with one sum of dx.

Chapters: book/tp/swiglu, book/tp/gqa.  In: x, and the weights of gate and up, or of query, key and value.
Out: one product per weight.
  messages   one sum of dx for all weights together, `T * h * bytes`, instead of one for each
  replicas   ranks that hold the same shard (replicas of a key head) sum its dW among themselves, beside the sum of dx
`dualpipe_lab.tp.linear` has the plain form for one weight; forward, backward and overlap are the same here.
Elsewhere: Megatron packs such weights into one matrix (`linear_qkv`, `linear_fc1`).
Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3; Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from dualpipe_lab.comm.call import Pending
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.tp.config import TensorParallel
from dualpipe_lab.tp.linear import check_tokens, flat_tokens, weight_grad
from dualpipe_lab.tp.mappings import TOKENS, start_all_gather, start_all_reduce, start_reduce_scatter


def fused_column_linear(
    x: Tensor, weights: Sequence[Tensor], tp: TensorParallel, replicas: Sequence[Group | None] = ()
) -> tuple[Tensor, ...]:
    """Multiply one input by several column-parallel weights; return `y_..SO` for each weight.

    Args:
        x: `x_..SD`, the same on every rank; under sequence parallelism the rank's tokens.
        weights: `weight_OD` each; O: this rank's outputs.
        tp: the ranks.
        replicas: for each weight, the ranks that hold the same shard and sum its gradient; None for a shard that only
            this rank holds (default: None for all).
    """
    check_tokens(x)
    out: tuple[Tensor, ...] = FusedColumnParallel.apply(x, tp, tuple(replicas) or (None,) * len(weights), *weights)
    return out


class FusedColumnParallel(torch.autograd.Function):
    """y_i = x W_i^T for every weight; dx = sum over ranks and weights of dy_i W_i."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tp: TensorParallel, replicas: tuple[Group | None, ...], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        full = start_all_gather(x, TOKENS, tp.group).wait() if tp.sequence_parallel else x
        ctx.tp, ctx.replicas = tp, replicas
        ctx.regathers = tp.sequence_parallel and tp.regather
        ctx.save_for_backward(x if ctx.regathers else full, *weights)
        return tuple(linear(full, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_dx, _, _, *needs_dw = ctx.needs_input_grad
        gathering = start_all_gather(x, TOKENS, ctx.tp.group) if ctx.regathers and any(needs_dw) else None
        summing = _start_input_grad(dys, weights, ctx.tp) if needs_dx else None
        if gathering is not None:
            x = gathering.wait()
        dws = [weight_grad(dy, x) if needed else None for dy, needed in zip(dys, needs_dw, strict=True)]
        pending = [
            start_all_reduce(dw, group) if dw is not None and group is not None else None
            for dw, group in zip(dws, ctx.replicas, strict=True)
        ]
        dws = [dw if part is None else part.wait() for dw, part in zip(dws, pending, strict=True)]
        return None if summing is None else summing.wait(), None, None, *dws


def _start_input_grad(dys: Sequence[Tensor], weights: Sequence[Tensor], tp: TensorParallel) -> Pending[Tensor]:
    """Add up dy_i W_i over this rank's weights, and launch the sum over the ranks."""
    dx = flat_tokens(dys[0]) @ weights[0]
    for dy, weight in zip(dys[1:], weights[1:], strict=True):
        dx.addmm_(flat_tokens(dy), weight)
    dx = dx.unflatten(0, dys[0].shape[:-1])
    summing = start_reduce_scatter(dx, TOKENS, tp.group) if tp.sequence_parallel else start_all_reduce(dx, tp.group)
    if not tp.overlap:
        summing.wait()
    return summing
