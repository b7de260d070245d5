"""The conjugate operators: what enters and leaves a region whose weights are cut, and what its gradient does.

Chapter: book/tp/column-parallel.  In: a tensor of every rank.  Out: a new tensor; arguments are never changed.
  operator                  forward          backward         for
  copy_to_ranks (f)         identity         all-reduce       a replicated input of column-parallel layers
  reduce_from_ranks (g)     all-reduce       identity         the partial outputs of row-parallel layers
  gather_from_ranks         all-gather       slice            cut features that every rank needs whole
  slice_to_ranks            slice            all-gather       whole features that go on cut
  gather_tokens             all-gather       reduce-scatter   f under sequence parallelism
  reduce_scatter_tokens     reduce-scatter   all-gather       g under sequence parallelism
The rule behind the table: the backward of a copy is a sum; the backward of a sum that all ranks use alike is a copy.
`torch.distributed.nn.functional.all_reduce` holds another rule, each rank's loss being its own: t times the gradient.
Elsewhere: Megatron mappings.py.  Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3; Korthikanti et al. 2022
(arXiv 2205.05198), section 4.2.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe_lab.comm.groups import Group
from dualpipe_lab.tp.async_collectives import own_slice, start_gather, start_reduce_scatter, start_sum

TOKENS = -2  # x_..SD: tokens are the last dimension but one, with or without a batch


def copy_to_ranks(x: Tensor, group: Group | None = None) -> Tensor:
    """f: the same tensor; its gradient is the sum of what the ranks' uses of it contribute."""
    out: Tensor = CopyToRanks.apply(x, group)
    return out


def reduce_from_ranks(x: Tensor, group: Group | None = None) -> Tensor:
    """g: the sum of the ranks' tensors; every summand's gradient is the gradient of the sum."""
    out: Tensor = ReduceFromRanks.apply(x, group)
    return out


def gather_from_ranks(x: Tensor, dim: int = -1, group: Group | None = None) -> Tensor:
    """The ranks' tensors joined along `dim`, for uses that are the same on every rank: the gradient is sliced."""
    out: Tensor = GatherFromRanks.apply(x, dim, group)
    return out


def slice_to_ranks(x: Tensor, dim: int = -1, group: Group | None = None) -> Tensor:
    """This rank's part of a replicated tensor; the gradients of the parts are joined.

    Raises:
        ValueError: the dimension does not divide among the ranks.
    """
    out: Tensor = SliceToRanks.apply(x, dim, group)
    return out


def gather_tokens(x: Tensor, group: Group | None = None, dim: int = TOKENS) -> Tensor:
    """All tokens, of which each rank has a part; uses differ by rank, so the gradient is summed and cut.

    Args:
        x: `x_..SD`; S: this rank's tokens, D: features.
        group: the ranks.
        dim: that of the tokens.
    """
    out: Tensor = GatherTokens.apply(x, dim, group)
    return out


def reduce_scatter_tokens(x: Tensor, group: Group | None = None, dim: int = TOKENS) -> Tensor:
    """This rank's tokens of the sum of the ranks' tensors; the gradients of the parts are joined.

    Args:
        x: `x_..SD`; S: all tokens, D: features.
        group: the ranks.
        dim: that of the tokens.

    Raises:
        ValueError: the tokens do not divide among the ranks.
    """
    out: Tensor = ReduceScatterTokens.apply(x, dim, group)
    return out


class CopyToRanks(torch.autograd.Function):
    """f: identity / all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # others may hold this gradient too, so the sum gets memory of its own
        return start_sum(grad.clone(memory_format=torch.contiguous_format), ctx.group).wait(), None


class ReduceFromRanks(torch.autograd.Function):
    """g: all-reduce / identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group | None) -> Tensor:
        return start_sum(x.clone(memory_format=torch.contiguous_format), group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class GatherFromRanks(torch.autograd.Function):
    """All-gather / slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group | None) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return start_gather(x, dim, group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return own_slice(grad, ctx.dim, ctx.group), None, None


class SliceToRanks(torch.autograd.Function):
    """Slice / all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group | None) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return own_slice(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return start_gather(grad, ctx.dim, ctx.group).wait(), None, None


class GatherTokens(torch.autograd.Function):
    """All-gather / reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group | None) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return start_gather(x, dim, group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return start_reduce_scatter(grad, ctx.dim, ctx.group).wait(), None, None


class ReduceScatterTokens(torch.autograd.Function):
    """Reduce-scatter / all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group | None) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return start_reduce_scatter(x, dim, group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return start_gather(grad, ctx.dim, ctx.group).wait(), None, None
