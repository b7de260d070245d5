"""Routes: where the rows of a microbatch go, sorted by expert on the source and on the rank of the experts.

Chapter: book/ep/smoe.  In: the ranks of expert parallelism, the experts that each token has chosen.  Out: a `Routes`.
  experts of rank r    r E / e to (r + 1) E / e
  slot           token * k + choice: one for each copy of a token that is sent
  order          slots by expert, and by token within an expert: a stable sort
  expert_major   rows in the order of arrival (source by source) into the order of this rank's experts: a stable sort
Both sorts are stable, so an expert sees its rows in the order of all ranks' tokens, on any number of ranks.
  messages       one exchange of E numbers, 8 (e - 1) / e E bytes sent, before the rows
Elsewhere: Megatron `MoEAlltoAllTokenDispatcher.preprocess`,
`expert_model_parallel_size` and `expert_data_parallel_group`; torchtitan `ExpertParallel`, token_dispatcher.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.ep.all_to_all import Splits, exchange_counts
from dualpipe_lab.ep.expert_rules import check_divides
from dualpipe_lab.launch.mesh import Mesh


@dataclass(frozen=True)
class ExpertParallel:
    """The ranks over which experts are sharded, and the ranks that replicate the same experts.

    Attributes:
        group: the ep group, whose ranks together hold all experts (default: the world).
        edp_group: the ranks that hold the same experts as this one, itself included; None: no other rank does.
    """

    group: Group | None = None
    edp_group: Group | None = None

    @classmethod
    def of(cls, mesh: Mesh) -> "ExpertParallel":
        """Take the `ep` and `edp` groups of a mesh; every rank of the world calls this, in the same order.

        Without an `ep` axis or `edp=`, every rank holds all experts, and the data-parallel ranks replicate them.
        """
        topology = mesh.topology
        edp = "edp" if topology.edp or "ep" in topology.names else "data"
        return cls(mesh.group("ep"), mesh.group(edp) if topology.size(edp) > 1 else None)

    @property
    def size(self) -> int:
        """The number e of ranks of the ep group."""
        return comm.get_world_size(self.group)

    def span(self, num_experts: int) -> tuple[int, int]:
        """Return the first expert of this rank and the first expert of the next rank.

        Raises:
            ValueError: the experts do not divide among the ranks.
        """
        share = check_divides(num_experts, self.size)
        rank = comm.get_rank(self.group)
        return rank * share, (rank + 1) * share


@dataclass(frozen=True)
class Routes:
    """The order and destination of the rows of one microbatch; S: slots of this rank, R: rows that it receives.

    Attributes:
        num_tokens, top_k: T and K, with S = T * K.
        order: `order_S`: the slots in the order in which their rows are sent.
        inverse: `inverse_S`: the position of each slot's row in that order.
        splits: rows to and from each rank.
        expert_major: `expert_major_R`: the received rows in the order of this rank's experts.
        arrival: `arrival_R`: the inverse permutation, from the order of the experts to the order of arrival.
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
    """Sort the slots by expert and exchange the counts of rows; all ranks of `ep` call this.

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
    on_host = torch.stack([sends, receives]).cpu()  # the one time that the host waits for the device
    rows = int(on_host[1].sum())
    local_expert = torch.arange(num_experts, device=slots.device) % share
    expert_of_row = local_expert.repeat_interleave(receives.flatten(), output_size=rows)
    expert_major = expert_of_row.argsort(stable=True)
    return Routes(
        num_tokens=experts.shape[0],
        top_k=experts.shape[1],
        order=order,
        inverse=_inverse(order),
        splits=Splits(*(tuple(rows) for rows in on_host.sum(2).tolist())),
        expert_major=expert_major,
        arrival=_inverse(expert_major),
        counts=tuple(on_host[1].sum(0).tolist()),
    )


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def check_choices(experts: Tensor, num_experts: int) -> None:
    """Raise ValueError for what no router makes: an expert that does not exist, or one that a token has twice."""
    if experts.dim() != 2 or experts.is_floating_point():
        raise ValueError(f"choices are whole numbers of shape [tokens, k], got {experts.dtype} {tuple(experts.shape)}")
    if not experts.numel():
        return
    ranked = experts.sort(1).values
    twice = (ranked[:, 1:] == ranked[:, :-1]).any(1)
    unknown = (experts < 0).any() | (experts >= num_experts).any()
    if not (unknown | twice.any()):  # one answer for the host to wait for
        return
    lowest, highest = int(experts.min()), int(experts.max())
    if unknown:
        raise ValueError(f"experts are numbered 0 to {num_experts - 1}, got choices from {lowest} to {highest}")
    token = int(twice.nonzero()[0])
    raise ValueError(
        f"a token chooses k different experts, got {experts[token].tolist()} for token {token}; take topk's indices"
    )
