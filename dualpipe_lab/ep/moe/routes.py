"""`Routes`: where the rows of one microbatch go, and how they lie on arrival.

Chapter: book/ep/smoe.  In: the experts that each token has chosen.  Out: two permutations, and the splits between them.
  slot           token * k + choice: one for each copy of a token that travels
  order          slots by expert, and by token within an expert: a stable sort
  expert_major   rows as they arrive, source by source, into the order of the experts of this rank: a stable sort too
Both sorts being stable, an expert sees its rows in the order of all ranks' tokens, on any number of ranks.
  messages       one exchange of E numbers, 8 (e - 1) / e E bytes sent, before the rows can travel
Elsewhere: Megatron `MoEAlltoAllTokenDispatcher.preprocess`; torchtitan token_dispatcher.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dualpipe_lab.ep.all_to_all import Splits, exchange_counts
from dualpipe_lab.ep.moe.config import ExpertParallel, check_divides


@dataclass(frozen=True)
class Routes:
    """One microbatch's way through the experts; S: slots of this rank, R: rows that arrive here.

    Attributes:
        num_tokens, top_k: T and K, with S = T * K.
        order: `order_S`: the slots in the order in which their rows are sent.
        inverse: `inverse_S`: where in that order each slot's row is.
        splits: rows to and from each rank.
        expert_major: `expert_major_R`: the arriving rows in the order of this rank's experts.
        arrival: `arrival_R`: the way back from that order.
        counts: rows of each expert of this rank.
    """

    num_tokens: int
    top_k: int
    order: Tensor
    inverse: Tensor
    splits: Splits
    expert_major: Tensor
    arrival: Tensor
    counts: tuple[int, ...]


def plan_routes(experts: Tensor, num_experts: int, ep: ExpertParallel) -> Routes:
    """Sort the slots by expert, and tell the other ranks how many rows will come; all ranks of `ep` call this.

    Args:
        experts: `experts_TK`, the experts that each token has chosen; T may be 0 and differ by rank.
        num_experts: E, of all ranks together.
        ep: the ranks.

    Raises:
        ValueError: the experts do not divide among the ranks, do not exist, or one is chosen twice by a token.
    """
    share = check_divides(num_experts, ep.size)
    check_choices(experts, num_experts)
    slots = experts.flatten()
    order = slots.argsort(stable=True)
    sends = torch.bincount(slots, minlength=num_experts).view(ep.size, share)
    receives = exchange_counts(sends, ep.group)
    expert_of_row = (torch.arange(num_experts, device=slots.device) % share).repeat_interleave(receives.flatten())
    expert_major = expert_of_row.argsort(stable=True)
    return Routes(
        num_tokens=experts.shape[0],
        top_k=experts.shape[1],
        order=order,
        inverse=_inverse(order),
        splits=Splits(tuple(sends.sum(1).tolist()), tuple(receives.sum(1).tolist())),
        expert_major=expert_major,
        arrival=_inverse(expert_major),
        counts=tuple(receives.sum(0).tolist()),
    )


def _inverse(order: Tensor) -> Tensor:
    """The permutation that undoes one."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def check_choices(experts: Tensor, num_experts: int) -> None:
    """Refuse choices that no router makes.

    Raises:
        ValueError: not `experts_TK`, an expert that does not exist, or one that a token has chosen twice.
    """
    if experts.dim() != 2 or experts.is_floating_point():
        raise ValueError(f"choices are whole numbers of shape [tokens, k], got {experts.dtype} {tuple(experts.shape)}")
    if not experts.numel():
        return
    lowest, highest = int(experts.min()), int(experts.max())
    if lowest < 0 or highest >= num_experts:
        raise ValueError(f"experts are numbered 0 to {num_experts - 1}, got choices from {lowest} to {highest}")
    ranked = experts.sort(1).values
    twice = (ranked[:, 1:] == ranked[:, :-1]).any(1).nonzero().flatten().tolist()
    if twice:
        chosen = experts[twice[0]].tolist()
        raise ValueError(f"a token chooses k different experts, got {chosen} for token {twice[0]}; take topk's indices")
