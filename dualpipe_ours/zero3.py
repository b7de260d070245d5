"""ZeRO-3: a layer whose weight is whole only while it works."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from dualpipe_lab.comm import get_rank

from .ring import all_gather, padded, reduce_scatter


def shard_of(weight: Tensor, ranks: list[int]) -> Tensor:
    """This rank's numbers of a weight, as a leaf."""
    me = ranks.index(get_rank())
    row = padded(weight.detach(), len(ranks)).view(len(ranks), -1)
    return row[me].clone().requires_grad_()  # a view would keep the whole row


class Unit(torch.autograd.Function):
    """`fn(x, weight)` of a weight in shards; between forward and backward it keeps x and the shard alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shard: Tensor, fn: Callable[..., Tensor], shape: tuple[int, ...], ranks: list[int]
    ) -> Tensor:
        """Gather, compute, let go."""
        ctx.save_for_backward(x, shard)
        ctx.rest = fn, shape, ranks
        return fn(x, _whole(shard, shape, ranks))  # autograd is off in here, and saves nothing

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gather again, and scatter the gradient's sum."""
        x, shard = ctx.saved_tensors
        fn, shape, ranks = ctx.rest
        with torch.enable_grad():
            x, weight = (t.detach().requires_grad_() for t in (x, _whole(shard, shape, ranks)))
            dx, dweight = torch.autograd.grad(fn(x, weight), (x, weight), dy)
        return dx, reduce_scatter(padded(dweight, len(ranks)), ranks), None, None, None


def _whole(shard: Tensor, shape: tuple[int, ...], ranks: list[int]) -> Tensor:
    return all_gather(shard.detach(), ranks)[: prod(shape)].view(shape)
