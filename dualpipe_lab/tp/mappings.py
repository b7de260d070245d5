"""The conjugate operators at the borders of a tensor-parallel region, and the collectives that they launch.

Chapter: book/tp/column-parallel.  In: a tensor of every rank.  Out: a new tensor; arguments are never changed.
The backward of a copy is a sum; the backward of a sum that all ranks use alike is a copy.
Under sequence parallelism `gather_tokens` takes the place of f, and `reduce_scatter_tokens` that of g.
`torch.distributed.nn.functional.all_reduce` adds the losses of all ranks: its gradient is t times that of g.
Collectives concatenate along the first dimension, and the batch is the first; gathering along another dimension costs
a copy, except with one sequence per batch.
Elsewhere: Megatron mappings.py.  Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3; Korthikanti et al. 2022
(arXiv 2205.05198), section 4.2.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe_lab import comm
from dualpipe_lab.comm.call import Pending
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.tp.shard import TensorParallel

Operator: TypeAlias = Callable[[Tensor, int, Group | None], Tensor]

TOKENS = -2  # x_..SD: tokens are the last dimension but one, with or without a batch


def copy_to_ranks(x: Tensor, group: Group | None = None) -> Tensor:
    """Return x, a replicated input, unchanged; the backward sums the gradient over the ranks (Megatron's f)."""
    out: Tensor = CopyToRanks.apply(x, group)
    return out


def reduce_from_ranks(x: Tensor, group: Group | None = None) -> Tensor:
    """Sum the partial outputs x over the ranks; the backward passes the gradient on unchanged (Megatron's g)."""
    out: Tensor = ReduceFromRanks.apply(x, group)
    return out


def gather_from_ranks(x: Tensor, dim: int = -1, group: Group | None = None) -> Tensor:
    """Gather the shards along `dim`; the backward keeps this rank's slice of the gradient.

    The gradient is right if every rank uses the result in the same way; otherwise use `gather_tokens`.
    """
    out: Tensor = AlongDimension.apply(x, _gather, local_slice, dim, group)
    return out


def slice_to_ranks(x: Tensor, dim: int = -1, group: Group | None = None) -> Tensor:
    """Keep this rank's shard of a replicated tensor along `dim`; the backward gathers the gradient.

    Raises:
        ValueError: the dimension does not divide among the ranks.
    """
    out: Tensor = AlongDimension.apply(x, local_slice, _gather, dim, group)
    return out


def gather_tokens(x: Tensor, group: Group | None = None, dim: int = TOKENS) -> Tensor:
    """Gather the tokens of all ranks; the backward reduce-scatters the gradient, since each rank uses them differently.

    `x_..SD`; S: this rank's tokens, D: features.  `dim`: the dimension of the tokens.
    """
    out: Tensor = AlongDimension.apply(x, _gather, _reduce_scatter, dim, group)
    return out


def reduce_scatter_tokens(x: Tensor, group: Group | None = None, dim: int = TOKENS) -> Tensor:
    """Sum over the ranks and keep this rank's tokens of the sum; the backward gathers the gradient.

    `x_..SD`; S: all tokens, D: features.  `dim`: the dimension of the tokens.

    Raises:
        ValueError: the tokens do not divide among the ranks.
    """
    out: Tensor = AlongDimension.apply(x, _reduce_scatter, _gather, dim, group)
    return out


class CopyToRanks(torch.autograd.Function):
    """f: identity / all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group | None) -> Tensor:
        ctx.group, _ = group, comm.get_world_size(group)  # something else than a group is refused before the backward
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # autograd may hand this gradient to other functions too, so the sum needs separate memory
        return all_reduce_async(grad.clone(memory_format=torch.contiguous_format), ctx.group).wait(), None


class ReduceFromRanks(torch.autograd.Function):
    """g: all-reduce / identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group | None) -> Tensor:
        return all_reduce_async(x.clone(memory_format=torch.contiguous_format), group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class AlongDimension(torch.autograd.Function):
    """An operator along a dimension, and the one that is its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, operator: Operator, backward: Operator, dim: int, group: Group | None) -> Tensor:
        if not isinstance(dim, int):
            raise TypeError(f"a dimension is a number, got {type(dim).__name__}; give a process group as group=")
        ctx.operator, ctx.dim, ctx.group = backward, dim, group
        return operator(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.operator(grad, ctx.dim, ctx.group), None, None, None, None


def _gather(x: Tensor, dim: int, group: Group | None) -> Tensor:
    return all_gather_async(x, dim, group).wait()


def _reduce_scatter(x: Tensor, dim: int, group: Group | None) -> Tensor:
    return reduce_scatter_async(x, dim, group).wait()


def all_reduce_async(x: Tensor, group: Group | None) -> Pending[Tensor]:
    """Launch the sum over the ranks, in place where x is contiguous: nothing else may read x meanwhile.

    A rank sends 2 (t - 1) / t * S, with S the bytes of the full tensor.
    """
    x = x.contiguous()
    return Pending([comm.all_reduce(x, group=group, async_op=True)], lambda: x)


def all_gather_async(x: Tensor, dim: int, group: Group | None) -> Pending[Tensor]:
    """Launch the concatenation of the ranks' tensors, all of one shape, along a dimension: (t - 1) / t * S bytes."""
    x, dim = x.contiguous(), dim % x.dim()
    shards = x.new_empty(comm.get_world_size(group), *x.shape)
    work = comm.all_gather_single(shards.flatten(0, 1), x, group, async_op=True)
    return Pending([work], lambda: shards.movedim(0, dim).flatten(dim, dim + 1))


def reduce_scatter_async(x: Tensor, dim: int, group: Group | None) -> Pending[Tensor]:
    """Launch the sum over the ranks, of which each rank keeps its shard: (t - 1) / t * S bytes.

    Raises:
        ValueError: `dim` does not divide.
    """
    size = comm.get_world_size(group)
    _check_divides(x.shape[dim], size, "a reduce-scatter")
    shards = x.unflatten(dim, (size, -1)).movedim(dim % x.dim(), 0).contiguous()
    local = shards.new_empty(shards.shape[1:])
    work = comm.reduce_scatter_single(local, shards.flatten(0, 1), group=group, async_op=True)
    return Pending([work], lambda: local)


def local_slice(x: Tensor, dim: int, group: Group | None) -> Tensor:
    """Return this rank's shard of a replicated tensor; ValueError if the dimension does not divide."""
    size = comm.get_world_size(group)
    _check_divides(x.shape[dim], size, "a slice")
    return x.chunk(size, dim)[comm.get_rank(group)]


def reduce_output(partial: Tensor, tp: TensorParallel) -> Tensor:
    """Sum the ranks' partial outputs, in place; under sequence parallelism, return the rank's tokens of the sum."""
    if tp.sequence_parallel:
        return _reduce_scatter(partial, TOKENS, tp.group)
    return all_reduce_async(partial, tp.group).wait()


def gather_output_grad(grad: Tensor, tp: TensorParallel) -> Tensor:
    """Return the gradient of all tokens: under sequence parallelism, gather it from the ranks."""
    return _gather(grad, TOKENS, tp.group) if tp.sequence_parallel else grad


def input_sum_async(dx: Tensor, tp: TensorParallel) -> Pending[Tensor]:
    """Launch the sum of dx over the ranks, of which a rank keeps its tokens under sequence parallelism."""
    summing = reduce_scatter_async(dx, TOKENS, tp.group) if tp.sequence_parallel else all_reduce_async(dx, tp.group)
    if not tp.overlap:
        summing.wait()
    return summing


def _check_divides(length: int, num_ranks: int, what: str) -> None:
    """Refuse a dimension that does not divide, before any message is sent."""
    if length % num_ranks:
        raise ValueError(
            f"{what} needs a dimension that divides among the ranks, got {length} on {num_ranks} ranks; "
            f"pad it to {-(-length // num_ranks) * num_ranks}"
        )
