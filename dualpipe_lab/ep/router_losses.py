"""Losses of a router: two that even out the experts' loads, one that keeps logits small.

Chapters: book/ep/topk-gradient, book/ep/gshard, book/ep/v3-moe.  In: logits, load.  Out: a scalar, no coefficient.
A product of means is not the mean of products, so the balance loss of all tokens is not the mean of the ranks' losses.
With the global load and number of tokens, from `sum_over_ranks`, each rank's result is a share: the shares add up to
the loss of one process with all tokens, with exactly its gradients.  The backward sends no message.
Elsewhere: GShard's is 1 / E^2 times the balance loss, with the load of first choices alone; Switch's is it, with k = 1;
DeepSeek-V3's is the sequence loss, with sigmoid scores; Megatron `aux_loss`, `seq_aux_loss`, `global_aux_loss`.
Source: Fedus et al. 2022 (arXiv 2101.03961), section 2.2; Zoph et al. 2022 (arXiv 2202.08906), section 3;
DeepSeek-AI 2024 (arXiv 2412.19437), section 2.1.2, complementary sequence-wise auxiliary loss.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.ep.router import Scoring, kept_positions, log_scores, normalised_grad


def balance_loss(logits: Tensor, load: Tensor, num_tokens: int | None = None, scoring: Scoring = "softmax") -> Tensor:
    """Return the balance loss E sum_e f_e P_e, a scalar; 0 for a rank without tokens.

    f_e is an expert's share of the choices, a constant; P_e the mean share of the scores.  The loss is 1 if all f_e are
    equal, E if all tokens go to one expert with certainty.

    Args:
        logits: `logits_TE` of this rank's tokens, as a `Routing` has them: without padding.
        load: `load_E`, how often each expert was chosen, before any token is dropped.
        num_tokens: the tokens that `load` counts, if they are more than this rank's T; then the result is a share.
        scoring: as in the router; sigmoid scores are divided by their sum over all experts.

    >>> float(balance_loss(torch.zeros(6, 4), torch.tensor([3, 3, 3, 3])))
    1.0
    """
    num_tokens = len(logits) if num_tokens is None else num_tokens
    f = (load.double() / load.sum().clamp(min=1)).to(logits.dtype)
    out: Tensor = SharesLoss.apply(logits, f * (logits.shape[-1] / max(num_tokens, 1)), scoring)
    return out


def z_loss(logits: Tensor, num_tokens: int | None = None) -> Tensor:
    """Return the mean over the tokens of the squared log-sum-exp of `logits_TE`; arguments as in `balance_loss`."""
    out: Tensor = ZLoss.apply(logits, len(logits) if num_tokens is None else num_tokens)
    return out


def sequence_loss(
    logits: Tensor,
    indices: Tensor,
    length: int,
    *,
    num_sequences: int | None = None,
    group: Group | None = None,
    scoring: Scoring = "sigmoid",
    padding: Tensor | None = None,
) -> Tensor:
    """Return DeepSeek-V3's balance loss per sequence: the mean over sequences of E sum_e f_e P_e, a scalar.

    f_e is the share of the sequence's choices that went to expert e, a constant; P_e the mean share of its scores.
    V3's equation counts the k largest unbiased scores instead of the experts that were chosen.  The shares of ranks and
    microbatches add up.  Along cp the ranks of a sequence sum their counts, B E integers of 8 bytes; P stays local.

    Args:
        logits: `logits_TE`, the sequences of this rank one after another, without padding.
        indices: `indices_TK`.
        length: positions of a sequence on this rank, padding included.
        num_sequences: of all ranks, if they are more than this rank's; then the result is a share.
        group: the ranks that share each sequence (cp), all of which call this; the result is then this rank's share of
            its loss.  None: every sequence lies on one rank.
        scoring: as in the router; scores are divided by their sum over all experts.
        padding: a mask of the sequences' positions, True where the tokens leave one out; a sequence of padding alone
            is none.

    Raises:
        ValueError: the positions are not a multiple of `length`, or the tokens not those of the mask.
    """
    num_positions = len(logits) if padding is None else padding.numel()
    if length < 1 or num_positions % length:
        raise ValueError(f"a loss per sequence needs whole ones, got {num_positions} tokens in sequences of {length}")
    kept = kept_positions(padding, num_positions)
    if kept is not None and len(kept) != len(logits):
        raise ValueError(
            f"the loss takes the tokens that a mask keeps, {len(kept)} of {num_positions}, got {len(logits)}; give it "
            "those of router(x, padding)"
        )
    sequence = (torch.arange(num_positions, device=logits.device) if kept is None else kept) // length
    num_experts, top_k = logits.shape[-1], indices.shape[-1]
    chosen = torch.zeros_like(logits, dtype=torch.int64).scatter_(-1, indices, 1)
    hits = chosen.new_zeros(num_positions // length, num_experts).index_add_(0, sequence, chosen)  # hits_BE
    if group is not None:
        comm.all_reduce(hits, group=group)
    hits = hits.double()  # whole numbers divided by each other would be float32
    num_hits = hits.sum(1, keepdim=True)  # top_k of every token of the full sequence
    if num_sequences is None:
        num_sequences = len(hits) if kept is None else int(num_hits.count_nonzero())
    num_hits = num_hits.clamp(min=1)
    price = hits / num_hits * (num_experts * top_k / max(num_sequences, 1) / num_hits)
    out: Tensor = SharesLoss.apply(logits, price.to(logits.dtype)[sequence], scoring)
    return out


def sum_over_ranks(load: Tensor, num_tokens: int, group: Group | None = None) -> tuple[Tensor, int]:
    """All-reduce the tokens per expert and the number of tokens; every rank of the group calls this."""
    both = torch.cat([load, load.new_tensor([num_tokens])])
    comm.all_reduce(both, group=group)
    return both[:-1], int(both[-1])


class SharesLoss(torch.autograd.Function):
    """The sum of prices c times shares p of the scores, for a constant price per expert, or per token and expert.

    The gradient of a token's logit i is p_i (c_i - sum_e c_e p_e), with sigmoid scores times 1 - sigmoid_i.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, price: Tensor, scoring: Scoring) -> Tensor:
        logs, slopes = log_scores(logits, scoring)
        p = logs.softmax(-1)
        ctx.save_for_backward(p, slopes, price)
        return ((p if price.dim() == p.dim() else p.sum(0)) * price).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        p, slopes, price = ctx.saved_tensors
        return normalised_grad(p, slopes, grad * price), None, None


class ZLoss(torch.autograd.Function):
    """The mean of squared log-sum-exps z^2; the gradient of a token's logit i is 2 / T z p_i."""

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
