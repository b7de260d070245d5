"""Ring softmax: the scores of a row lie on several ranks, and pairs (max, sum) travel instead of scores.

Chapter: book/cp/ring-softmax.  In: this rank's columns of the scores, a group of N ranks.  Out: their weights.
  bytes sent per row     ring of pairs (N - 1) * 2 beta      N - 1 messages, each pair as it was first sent
                         two all-reduces 2 * 2 (N - 1) / N * beta       the maximum, then the sum: 4 (N - 1) latencies
  backward               2 (N - 1) / N * beta                one all-reduce of <y, dy>
with beta bytes per number of the state (fp32 for 16-bit scores).  Ranks may hold any number of columns, also none.
The ring merges the pairs in another order on every rank: sums may differ in the last bit.
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
from dualpipe_lab.cp.online_softmax import MaxSum
from dualpipe_lab.cp.ring import Ring
from dualpipe_lab.cp.softmax import accumulate_in, reference
from dualpipe_lab.cp.step_log import StepLog
from dualpipe_lab.viz.steplog import Cell


def ring_softmax(x: Tensor, group: Group | None = None, log: StepLog | None = None) -> Tensor:
    """The weights of this rank's columns, by a ring of pairs; differentiable.

    Args:
        x: this rank's scores `x_..K`; rows are the same on every rank, the number K of columns is not.
        group: the ranks that share the rows.
        log: filled with the first row's pairs after each step.
    """
    weights: Tensor = _Sharded.apply(x, group, partial(ring_max_sum, group=group, log=log))
    return weights


def all_reduce_softmax(x: Tensor, group: Group | None = None) -> Tensor:
    """The same by two all-reduces: the maximum of all, then the sum of what each rank has rescaled to it."""
    weights: Tensor = _Sharded.apply(x, group, partial(all_reduce_max_sum, group=group))
    return weights


def ring_max_sum(state: MaxSum, group: Group | None = None, log: StepLog | None = None) -> MaxSum:
    """The pair of all ranks' scores: every rank passes on what came, and merges it."""
    ring = Ring(group)
    block = torch.stack(state)
    if log is not None:
        log.start = [_cell(state, ring.position)]
    for step in range(ring.size - 1):
        sent, owner = block, ring.behind(step)
        block = ring.turn(sent, torch.empty_like(sent), label=f"pair {owner}").wait()
        state = state.merge(MaxSum(*block))
        if log is not None:
            cells = [_cell(state, None), _cell(MaxSum(*block), ring.behind(step + 1))]
            log.add(f"turn {step + 1}", ring.behind(-1), [_cell(MaxSum(*sent), owner)], cells)
    return state


def all_reduce_max_sum(state: MaxSum, group: Group | None = None) -> MaxSum:
    """The pair of all ranks' scores, by an all-reduce of the maximum and one of the sums."""
    maximum = state.maximum.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(maximum, "max", group)
    total = (state.total * torch.exp(state.maximum - reference(maximum))).contiguous()
    comm.all_reduce(total, group=group)
    return MaxSum(maximum, total)


def sharded_softmax_backward(y: Tensor, dy: Tensor, group: Group | None = None) -> Tensor:
    """The gradient of this rank's scores: <y, dy> is a sum over all columns, so over all ranks."""
    wide, dwide = (tensor.to(accumulate_in(tensor.dtype)) for tensor in (y, dy))
    product = (wide * dwide).sum(-1)
    comm.all_reduce(product, group=group)
    return (wide * (dwide - product[..., None])).to(dy.dtype)


class _Sharded(torch.autograd.Function):
    """A softmax over columns that are spread over ranks; `combine` makes the pair of all from that of each."""

    @staticmethod
    def forward(context: Any, x: Tensor, group: Group | None, combine: Callable[[MaxSum], MaxSum]) -> Tensor:
        y = combine(MaxSum.of(x)).weights(x)
        context.save_for_backward(y)
        context.group = group
        return y

    @staticmethod
    @once_differentiable
    def backward(context: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (y,) = context.saved_tensors
        return sharded_softmax_backward(y, dy, context.group), None, None


def _cell(state: MaxSum, colour: int | None) -> Cell:
    first = [values.reshape(-1)[:1].tolist() for values in state]
    return ",".join(f"{value:.3g}" for row in first for value in row) or "-", colour
