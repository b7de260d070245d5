"""Two losses of a router: one that pulls the experts' loads together, one that keeps logits small.

Chapters: book/ep/topk-gradient, book/ep/gshard.  In: logits, tokens per expert.  Out: a number, without a coefficient.
  balance_loss   E sum_e f_e P_e    f_e: share of the choices, a constant; P_e: mean share of the scores
                                    1 if all f_e are equal, E if all tokens go to one expert with certainty
  z_loss         mean of z^2        z: log sum exp of a token's logits
  gradients      E / T p_i (f_i - sum_e f_e p_e)    and    2 / T z p_i    for logit i of a token
A product of means is not the mean of products, so the balance loss of all tokens is not the mean of the ranks' losses.
Per rank: own load, own number of tokens; no message.  Global: both from `sum_over_ranks`, one all-reduce of E + 1
integers; then each rank's result is its share, the shares add up to the loss of one process that has all tokens, and
the gradients are exactly that process's.  Nothing travels in the backward, because f is a constant.
Elsewhere: GShard's is 1 / E^2 times this, with the load of first choices alone; Switch's is this, with k = 1;
DeepSeek-V3's is this per sequence, with sigmoid scores; Megatron `aux_loss`, `seq_aux_loss`, `global_aux_loss`.
Source: Fedus et al. 2022 (arXiv 2101.03961), section 2.2; Zoph et al. 2022 (arXiv 2202.08906), section 3.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.ep.router import Scoring, log_scores, normalised_grad


def balance_loss(logits: Tensor, load: Tensor, num_tokens: int | None = None, scoring: Scoring = "softmax") -> Tensor:
    """E sum_e f_e P_e, a scalar; for a rank without tokens 0.

    Args:
        logits: `logits_TE` of this rank's tokens.
        load: `load_E`, how often each expert was chosen, before any token is dropped.
        num_tokens: those that `load` comes from, if that is more than this rank's T; then the result is a share.
        scoring: as in the router; sigmoid scores are divided by their sum over all experts.

    >>> float(balance_loss(torch.zeros(6, 4), torch.tensor([3, 3, 3, 3])))
    1.0
    """
    out: Tensor = BalanceLoss.apply(logits, load, len(logits) if num_tokens is None else num_tokens, scoring)
    return out


def z_loss(logits: Tensor, num_tokens: int | None = None) -> Tensor:
    """Mean over the tokens of the squared log-sum-exp of `logits_TE`, a scalar; arguments as in `balance_loss`."""
    out: Tensor = ZLoss.apply(logits, len(logits) if num_tokens is None else num_tokens)
    return out


def sum_over_ranks(load: Tensor, num_tokens: int, group: Group | None = None) -> tuple[Tensor, int]:
    """Tokens per expert, and tokens, of all ranks of the group; also a rank without tokens calls this."""
    both = torch.cat([load, load.new_tensor([num_tokens])])
    comm.all_reduce(both, group=group)
    return both[:-1], int(both[-1])


class BalanceLoss(torch.autograd.Function):
    """The load is a constant; the gradient goes through the scores alone."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, load: Tensor, num_tokens: int, scoring: Scoring) -> Tensor:
        num_experts = logits.shape[-1]
        logs, slopes = log_scores(logits, scoring)
        p = logs.softmax(-1)
        f = load.to(p.dtype) / max(int(load.sum()), 1)
        price = f * (num_experts / max(num_tokens, 1))  # of one token's share of each expert
        ctx.save_for_backward(p, slopes, price)
        return (p.sum(0) * price).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        p, slopes, price = ctx.saved_tensors
        return normalised_grad(p, slopes, grad * price), None, None, None


class ZLoss(torch.autograd.Function):
    """Squares of log-sum-exps."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, num_tokens: int) -> Tensor:
        z = logits.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(logits, z)
        ctx.num_tokens = max(num_tokens, 1)
        return z.square().sum() / ctx.num_tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, z = ctx.saved_tensors
        p = (logits - z).exp()
        return grad * 2 / ctx.num_tokens * z * p, None
