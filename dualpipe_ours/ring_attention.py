"""Ring attention: keys and values go round, and their gradients come back to their owner."""

from typing import Any

import torch
from torch import Tensor

from dualpipe_lab.comm import get_rank

from .ring import pass_on
from .softmax import merge, state_of


class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's positions to those of all ranks: (heads, T / N, size), equal parts in order."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ranks: list[int]) -> Tensor:
        """Output of this rank's queries, as large as q."""
        num, me = len(ranks), ranks.index(get_rank())
        state, block = state_of(_scores(q, k, 0), v), torch.stack([k, v])
        for step in range(1, num):
            block = pass_on(block, block, ranks)
            if step <= me:  # the block of rank me - step; that of a later rank is hidden and only passed on
                state = merge(state, state_of(_scores(q, block[0], step), block[1]))
        top, total, values = state
        out = values / total[..., None]
        ctx.save_for_backward(q, k, v, out, top + total.log())  # the LSE of all keys, not of one block
        ctx.ranks = ranks
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v of this rank."""
        q, k, v, out, lse = ctx.saved_tensors
        num, me, scale = len(ctx.ranks), ctx.ranks.index(get_rank()), q.shape[-1] ** -0.5
        delta = (dout * out).sum(-1, keepdim=True)  # the sum of P dP over the keys of all ranks
        block = torch.stack([k, v])
        dq, grads = torch.zeros_like(q), torch.zeros_like(block)
        for step in range(num):
            if step <= me:
                weights = (_scores(q, block[0], step) - lse[..., None]).exp()
                ds = scale * weights * (dout @ block[1].mT - delta)
                dq += ds @ block[0]
                grads += torch.stack([ds.mT @ q, weights.mT @ dout])
            if num > 1:  # gradients take N hops, the last of them to the owner of the block
                grads = pass_on(grads, grads, ctx.ranks)
                block = pass_on(block, block, ctx.ranks) if step < num - 1 else block
        return dq, grads[0], grads[1], None


def _scores(q: Tensor, k: Tensor, step: int) -> Tensor:
    """Scaled scores; of the rank's own block the later positions are hidden."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if step:
        return scores
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
