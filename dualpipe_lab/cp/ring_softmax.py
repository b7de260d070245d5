"""Ring softmax: the scores of a row are sharded over ranks, and pairs (max, sum) travel instead of scores.

Chapter: book/cp/ring-softmax.  In: this rank's columns of the scores, a group of N ranks.  Out: their weights.
  bytes sent per row     ring of pairs (N - 1) * 2 beta      N - 1 messages; a pair is forwarded unchanged
                         two all-reduces 2 * 2 (N - 1) / N * beta       the maximum, then the sum: 4 (N - 1) latencies
  backward               2 (N - 1) / N * beta                one all-reduce of <y, dy>
with beta bytes per number of the state (fp32 for 16-bit scores).  A rank may hold any number of columns, also none.
Each rank of the ring merges the pairs in another order.  Their sums may therefore differ in the last bit.
Elsewhere: Megatron `_VocabParallelCrossEntropy` (two all-reduces); ring attention, which merges outputs too.
Source: Milakov and Gimelshein 2018 (arXiv 1805.02867), section 3.1; Liu, Zaharia and Abbeel 2023 (arXiv 2310.01889).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.cp.online_softmax import SoftmaxStats
from dualpipe_lab.cp.ring import Ring
from dualpipe_lab.cp.softmax import accumulation_dtype, reference


def ring_softmax(x: Tensor, group: Group | None = None) -> Tensor:
    """Return the softmax weights of this rank's columns by a ring of pairs; differentiable.

    Args:
        x: this rank's scores `x_..K`; rows are the same on every rank, the number K of columns is not.
        group: the ranks that share the rows.
    """
    weights: Tensor = _ShardedSoftmax.apply(x, group, partial(ring_softmax_stats, group=group))
    return weights


def all_reduce_softmax(x: Tensor, group: Group | None = None) -> Tensor:
    """Return the same weights as `ring_softmax` by two all-reduces: of the maxima, then of the rescaled sums."""
    weights: Tensor = _ShardedSoftmax.apply(x, group, partial(all_reduce_softmax_stats, group=group))
    return weights


def ring_softmax_stats(state: SoftmaxStats, group: Group | None = None) -> SoftmaxStats:
    """Return the pair of all ranks' scores by a ring: every rank merges each pair that arrives and sends it on."""
    ring, pair = Ring(group), torch.stack(state)
    for step in range(ring.size - 1):
        pair = ring.send_recv(pair, torch.empty_like(pair), label=f"pair {ring.source(step)}").wait()
        state = state.merge(SoftmaxStats(*pair))
    return state


def all_reduce_softmax_stats(state: SoftmaxStats, group: Group | None = None) -> SoftmaxStats:
    """Return the pair of all ranks' scores by an all-reduce of the maxima and an all-reduce of the rescaled sums."""
    maximum = state.maximum.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(maximum, "max", group)
    total = (state.total * torch.exp(state.maximum - reference(maximum))).contiguous()
    comm.all_reduce(total, group=group)
    return SoftmaxStats(maximum, total)


def sharded_softmax_backward(y: Tensor, dy: Tensor, group: Group | None = None) -> Tensor:
    """Return the gradient of this rank's scores; <y, dy> sums over all columns, so it is all-reduced."""
    wide, dwide = (tensor.to(accumulation_dtype(tensor.dtype)) for tensor in (y, dy))
    product = (wide * dwide).sum(-1)
    comm.all_reduce(product, group=group)
    return (wide * (dwide - product[..., None])).to(dy.dtype)


class _ShardedSoftmax(torch.autograd.Function):
    """Softmax over columns that are sharded over ranks; `combine` reduces the ranks' pairs to one."""

    @staticmethod
    def forward(
        context: Any, x: Tensor, group: Group | None, combine: Callable[[SoftmaxStats], SoftmaxStats]
    ) -> Tensor:
        y = combine(SoftmaxStats.of(x)).weights(x)
        context.save_for_backward(y)
        context.group = group
        return y

    @staticmethod
    @once_differentiable
    def backward(context: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (y,) = context.saved_tensors
        return sharded_softmax_backward(y, dy, context.group), None, None
