"""`TopKRouter`: the choice of k of E experts for each token, and their weights with a hand-written gradient.

Chapter: book/ep/topk-gradient.  In: tokens `x_TD`.  Out: a `Routing`: experts, weights, tokens per expert.
The choice has no gradient.  No message: every rank routes its local tokens.
Padding is left out before: a `Routing` has rows for tokens alone, so loads, losses and slots count nothing else.
Elsewhere: Megatron `TopKRouter`; torchtitan `TokenChoiceTopKRouter`; DeepSeek-V3 `Gate`.
Source: Shazeer et al. 2017 (arXiv 1701.06538), section 2.1; Fedus et al. 2022 (arXiv 2101.03961), section 2.1.
"""

from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, logsigmoid

from dualpipe_lab.launch.context import device
from dualpipe_lab.tp.shard import initialize_parameters

Scoring: TypeAlias = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    """The experts and weights of each token; T: tokens, padding left out, K: experts per token, E: experts."""

    indices: Tensor  # indices_TK, int64, the chosen experts, best first; no expert twice for one token
    weights: Tensor  # weights_TK, with the gradient of this module
    load: Tensor  # load_E, int64, tokens per expert; their sum is T * K
    logits: Tensor  # logits_TE, for the losses of `dualpipe_lab.ep.router_losses`


class TopKRouter(nn.Module):
    """A linear layer that computes a logit per token and expert, and chooses the k experts with the largest logits.

    Args:
        hidden_size: of a token.
        num_experts: E, of all ranks together; the weight is initialised by its name, the same on every rank.
        num_experts_per_token: k.
        scoring: how a logit becomes a score: "softmax" over all experts, or "sigmoid" of its own logit.
        normalise: divide the scores of the chosen experts by their sum.
        scale: the weights are multiplied by it.
        dtype: of the weight and of all computation here; use float32 also where tokens have 16 bits.

    Raises:
        ValueError: k is not in 1..E, an unknown scoring, or a normalised single expert: its weight is always 1.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_experts_per_token: int,
        *,
        scoring: Scoring = "softmax",
        normalise: bool = False,
        scale: float = 1.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_count(num_experts_per_token, num_experts)
        _check_scoring(scoring)
        if normalise and num_experts_per_token == 1:
            raise ValueError(
                "the normalised weight of a single expert is 1 whatever its logit is, so the router would get no "
                "gradient; use normalise=False with num_experts_per_token=1, as Switch does"
            )
        self.num_experts, self.num_experts_per_token = num_experts, num_experts_per_token
        self.scoring: Scoring = scoring
        self.normalise, self.scale = normalise, scale
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype, device=device()))
        initialize_parameters(self)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Routing:
        """Route the tokens `x_TD`; T may be 0.  `padding_T`: True where a position is padding, which is left out.

        Raises:
            ValueError: a token's logits are NaN or infinite, or the mask has another type or size.
        """
        x = leave_out(x, kept_positions(padding, len(x)))
        logits = linear(x.to(self.weight.dtype), self.weight)
        # by logits, not by scores, because rounding can make different scores equal
        indices = self.choose(logits.detach())
        weights = expert_weights(logits, indices, self.scoring, self.normalise, self.scale)
        return Routing(indices, weights, tokens_per_expert(indices, self.num_experts), logits)

    def choose(self, logits: Tensor) -> Tensor:
        """Return `indices_TK` for `logits_TE`; a subclass may override this method and keeps the gradient."""
        return top_experts(logits, self.num_experts_per_token)


def kept_positions(padding: Tensor | None, num_positions: int) -> Tensor | None:
    """Return the positions of a mask that are no padding, `kept_T`, in their order; None without a mask.

    Raises:
        ValueError: a mask of another type or size.
    """
    if padding is None:
        return None
    if padding.dtype != torch.bool or padding.numel() != num_positions:
        raise ValueError(
            f"padding has a bool for each of {num_positions} positions, True where it is padding, got {padding.dtype} "
            f"{tuple(padding.shape)}; of an attention_mask with 1 for tokens use attention_mask == 0"
        )
    return (~padding.flatten()).nonzero().squeeze(1)


def leave_out(x: Tensor, kept: Tensor | None) -> Tensor:
    """Return the rows of `x_TD` that are kept; all without a mask."""
    return x if kept is None else x.index_select(0, kept)


def put_back(y: Tensor, kept: Tensor | None, num_positions: int) -> Tensor:
    """Put rows back to the positions from which `leave_out` took them, with zeros between."""
    return y if kept is None else y.new_zeros(num_positions, *y.shape[1:]).index_copy(0, kept, y)


def top_experts(scores: Tensor, num_experts_per_token: int) -> Tensor:
    """Return `indices_TK` of the largest of `scores_TE`, largest first, the lower number first among equals.

    The order of `torch.topk` is undefined among equals.  -inf excludes an expert.

    Raises:
        ValueError: k is not in 1..E; a score is NaN or +inf; a token has fewer than k scores above -inf.

    >>> top_experts(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 3)
    tensor([[1, 2, 3]])
    """
    _check_count(num_experts_per_token, scores.shape[-1])
    wrong = scores.isnan().any(-1) | (scores == torch.inf).any(-1)
    wrong |= (scores > -torch.inf).sum(-1) < num_experts_per_token
    if wrong.any():
        token = int(wrong.nonzero()[0, 0])
        raise ValueError(
            f"a token needs {num_experts_per_token} finite scores, none of them NaN or +inf, got "
            f"{scores[token].tolist()} for token {token}; look at the router's input and weight"
        )
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :num_experts_per_token].contiguous()


def expert_weights(
    logits: Tensor, indices: Tensor, scoring: Scoring = "softmax", normalise: bool = False, scale: float = 1.0
) -> Tensor:
    """Return `weights_TK` of the chosen experts.

    With softmax scores that are not normalised, the logits of all experts get a gradient; else those of the chosen.

    Args:
        logits: `logits_TE`.
        indices: `indices_TK`, no expert twice; from any rule of choice.
        scoring: as in `TopKRouter`.
        normalise: as there.
        scale: as there.

    Raises:
        ValueError: an unknown scoring.

    >>> expert_weights(torch.tensor([[0.0, 0.0, -1.0]]), torch.tensor([[0, 1]]), normalise=True)
    tensor([[0.5000, 0.5000]])
    """
    _check_scoring(scoring)
    function = NormalisedWeights if normalise else SoftmaxWeights if scoring == "softmax" else SigmoidWeights
    out: Tensor = function.apply(logits, indices, scale, scoring)
    return out


def tokens_per_expert(indices: Tensor, num_experts: int) -> Tensor:
    """Count the local tokens of each expert: `load_E`, int64.

    >>> tokens_per_expert(torch.tensor([[0, 2], [2, 1]]), 4)
    tensor([1, 1, 2, 0])
    """
    return indices.reshape(-1).bincount(minlength=num_experts)


def log_scores(logits: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor | None]:
    """Return the logarithms of the scores, up to a constant per token, and their derivatives by the logits (None: 1).

    Their softmax is the scores divided by their sum, also where every score underflows.
    """
    return (logits, None) if scoring == "softmax" else (logsigmoid(logits), logits.neg().sigmoid())


def normalised_grad(shares: Tensor, slopes: Tensor | None, grad: Tensor) -> Tensor:
    """Return the gradient of the logits whose scores, divided by their sum, are `shares`."""
    grad = shares * (grad - (shares * grad).sum(-1, keepdim=True))
    return grad if slopes is None else grad * slopes


class SoftmaxWeights(torch.autograd.Function):
    """Weights p_i: the softmax over all experts; with g their gradient, logit i gets p_i (g_i [i in S] - sum_S p g)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, indices: Tensor, scale: float, scoring: Scoring) -> Tensor:
        p = logits.softmax(-1)
        ctx.save_for_backward(p, indices)
        ctx.scale = scale
        return scale * p.gather(-1, indices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        p, indices = ctx.saved_tensors
        full = torch.zeros_like(p).scatter_(-1, indices, ctx.scale * grad)
        return normalised_grad(p, None, full), None, None, None


class SigmoidWeights(torch.autograd.Function):
    """Weights s_i: the sigmoid of each chosen logit, which gets the gradient s_i (1 - s_i) g_i."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, indices: Tensor, scale: float, scoring: Scoring) -> Tensor:
        s = logits.gather(-1, indices).sigmoid()
        ctx.save_for_backward(s, indices)
        ctx.scale, ctx.shape = scale, logits.shape
        return scale * s

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        s, indices = ctx.saved_tensors
        chosen = ctx.scale * grad * s * (1 - s)
        return chosen.new_zeros(ctx.shape).scatter_(-1, indices, chosen), None, None, None


class NormalisedWeights(torch.autograd.Function):
    """Weights v_i: the chosen scores divided by their sum, the softmax of their logarithms.

    A chosen logit gets the gradient v_i (g_i - sum_S v g), with sigmoid scores times 1 - s_i; with k = 1 it is zero.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, indices: Tensor, scale: float, scoring: Scoring) -> Tensor:
        logs, slopes = log_scores(logits.gather(-1, indices), scoring)
        v = logs.softmax(-1)
        ctx.save_for_backward(v, slopes, indices)
        ctx.scale, ctx.shape = scale, logits.shape
        return scale * v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        v, slopes, indices = ctx.saved_tensors
        chosen = normalised_grad(v, slopes, ctx.scale * grad)
        return chosen.new_zeros(ctx.shape).scatter_(-1, indices, chosen), None, None, None


def _check_count(num_experts_per_token: int, num_experts: int) -> None:
    if not 1 <= num_experts_per_token <= num_experts:
        raise ValueError(f"a token goes to 1..{num_experts} of {num_experts} experts, got {num_experts_per_token}")


def _check_scoring(scoring: str) -> None:
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring is 'softmax' or 'sigmoid', got {scoring!r}")
