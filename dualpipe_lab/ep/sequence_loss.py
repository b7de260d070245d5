"""DeepSeek-V3's loss per sequence: no single sequence should use few experts.

Chapter: book/ep/v3-moe.  In: logits and choices of whole sequences.  Out: a number, without a coefficient.
  of a sequence   E sum_e f_e P_e    f_e: share of its choices, a constant; P_e: mean share of its scores
  gradient        of logit i of a token: E / s p_i (1 - sigmoid_i) (f_i - sum_e f_e p_e), over the number of sequences
Shares of ranks and microbatches add up to the loss of one process; no message.
Elsewhere: Megatron `seq_aux_loss`.
Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 2.1.2, complementary sequence-wise auxiliary loss.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe_lab.ep.router import log_scores, normalised_grad


def sequence_loss(logits: Tensor, indices: Tensor, length: int, num_sequences: int | None = None) -> Tensor:
    """Mean over the sequences of E sum_e f_e P_e, with f and P of one sequence; a scalar, without a coefficient.

    f_e is the share of the sequence's choices that went to expert e, a constant; P_e the mean share of its scores.
    V3's equation counts the k largest unbiased scores instead of the experts that were chosen.

    Args:
        logits: `logits_TE`, one whole sequence of this rank after another.
        indices: `indices_TK`.
        length: tokens of a sequence.
        num_sequences: of all ranks, if there are more: then this is the rank's share, and the shares add up.

    Raises:
        ValueError: tokens that are no whole number of sequences.
    """
    if length < 1 or len(logits) % length:
        raise ValueError(f"a loss per sequence needs whole ones, got {len(logits)} tokens in sequences of {length}")
    count = max(len(logits) // length if num_sequences is None else num_sequences, 1)
    out: Tensor = SequenceLoss.apply(logits, indices, length, count)
    return out


class SequenceLoss(torch.autograd.Function):
    """The choices are constants; the gradient goes through the scores alone."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, indices: Tensor, length: int, count: int) -> Tensor:
        num_experts = logits.shape[-1]
        logs, slopes = log_scores(logits, "sigmoid")
        p = logs.softmax(-1)
        hits = torch.zeros_like(p).scatter_(-1, indices, 1.0)
        f = hits.unflatten(0, (-1, length)).mean(1) / indices.shape[-1]
        price = (f * (num_experts / length / count)).repeat_interleave(length, 0)  # of one token's share
        ctx.save_for_backward(p, slopes, price)
        return (p * price).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        p, slopes, price = ctx.saved_tensors
        return normalised_grad(p, slopes, grad * price), None, None, None
