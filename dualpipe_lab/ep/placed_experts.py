"""`PlacedExperts`: a routed layer whose experts lie where a plan puts them, some on several ranks.

Chapter: book/ep/moving-experts.  In: an `Experts` and a plan of EPLB.  Out: the same layer, with S slots for E experts.
  slots of rank r     r S / e to (r + 1) S / e; a slot has the weights of one expert, a replica
  sharing             the choices of expert i on source rank r, in the order of the tokens, go to the replicas
                      r, r + 1, ... modulo R_i: no number is drawn, so a forward that runs twice sends alike
  replica sum         reduce-scatter and all-gather among the R_i slots: 2 (R_i - 1) / R_i * 3 h f numbers sent for each
                      slot, added in the order of the slots, so that replicas stay equal to the last bit
A replica's gradient has the tokens that came to it.  The gradient of the expert is the sum, not the mean: no token went
to two replicas.  `reduce_gradients` adds replicas, and so do Ddp and ZeRO-1 to 3 over a mesh (`dualpipe_lab.dp.slots`).
Elsewhere: vLLM and SGLang place replicas in serving, where no gradient exists; Megatron has no replicas of experts.
Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 3.4, for redundant experts.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualpipe_lab.ep.all_to_all import Splits, start_rows
from dualpipe_lab.ep.eplb.placement import ExpertPlacement, make_placement
from dualpipe_lab.ep.expert_rules import check_divides
from dualpipe_lab.ep.moe.config import ExpertParallel
from dualpipe_lab.ep.moe.layer import Experts, MoE
from dualpipe_lab.ep.moe.permutation import check_choices
from dualpipe_lab.tp.shard import Shard

NAMES = ("gate", "up", "down")


class Transfer(NamedTuple):
    """One block on its way: from rank `source` to rank `target` of the ep group; `item` names the block on both."""

    source: int
    target: int
    item: tuple[int, int]
    size: int


def exchange_blocks(
    transfers: Iterable[Transfer], read: Callable[[tuple[int, int]], Tensor], like: Tensor, ep: ExpertParallel
) -> dict[tuple[int, int], Tensor]:
    """Send blocks of any sizes in one all-to-all, and return those for this rank, flat, by item.

    Args:
        transfers: of all ranks, the same list on each; one from a rank to itself is copied there.
        read: the block of an item of which this rank is the source.
        like: a tensor of the type and device of the blocks.
        ep: the ranks; all of them call this.
    """
    transfers, rank = list(transfers), ep.rank
    sends = sorted((t for t in transfers if t.source == rank), key=lambda t: (t.target, t.item))
    receives = sorted((t for t in transfers if t.target == rank), key=lambda t: (t.source, t.item))
    splits = Splits(
        tuple(sum(t.size for t in sends if t.target == other) for other in range(ep.size)),
        tuple(sum(t.size for t in receives if t.source == other) for other in range(ep.size)),
    )
    packed = torch.cat([read(t.item).reshape(-1) for t in sends]) if sends else like.new_empty(0)
    parts = start_rows(packed, splits, ep.group).wait().split([t.size for t in receives])
    return {t.item: part for t, part in zip(receives, parts, strict=True)}


class PlacedExperts(Experts):
    """SwiGLU experts in the slots of a placement: `S / e` of them on this rank, replicas among them.

    Args:
        experts: the layer whose weights it takes over, by messages; all ranks of its ep group call this.
        placement: of EPLB; one of its layers is this one.
        layer: the number of the layer in the placement.

    Attributes:
        gate, up, down: `gate_NFD`, `up_NFD`, `down_NDF` of the N slots of this rank.
        shards: the slots of this rank, by parameter; so optimizers over a mesh sum replicas and count an expert once,
            and state dicts and checkpoints have each expert once, by its number.
        slot_experts: `slot_experts_S`, the expert in each slot of all ranks.
        expert_slots: `expert_slots_ER`, the slots of each expert, padded with -1.
        counts: `counts_E`, the number of replicas of each expert.

    Raises:
        ValueError: a placement for other experts, or with slots that do not divide among the ranks.
    """

    slot_experts: Tensor
    expert_slots: Tensor
    counts: Tensor

    def __init__(self, experts: Experts, placement: ExpertPlacement, layer: int = 0) -> None:
        nn.Module.__init__(self)  # the weights come from `experts`, and none are drawn
        self.ep, self.num_experts = experts.ep, experts.num_experts
        check_placement(placement, layer, self.num_experts, self.ep.size)
        self.set_placement(placement, layer, experts.gate.device)
        old = torch.arange(self.num_experts).tolist()
        blocks = take_slots(old, self.table, experts.weights, self.ep)
        for name, block in zip(NAMES, blocks, strict=True):
            self.register_parameter(name, nn.Parameter(block, getattr(experts, name).requires_grad))

    def set_placement(self, placement: ExpertPlacement, layer: int = 0, at: torch.device | None = None) -> None:
        """Route by another placement from now on; the weights stay where they are (`move_experts` moves both)."""
        at = self.slot_experts.device if at is None else at
        self.table: list[int] = placement.physical_to_logical[layer].tolist()
        for name, tensor in zip(("slot_experts", "expert_slots", "counts"), placement, strict=True):
            self.register_buffer(name, tensor[layer].to(at), persistent=False)
        span, table = self.span, tuple(self.table)
        shard = Shard(0, span.start, span.stop, self.num_experts, mesh_axis="ep", slots=table)
        self.shards = dict.fromkeys(NAMES, shard)

    @property
    def num_slots(self) -> int:
        """The number of slots of all ranks together: S."""
        return len(self.table)

    @property
    def span(self) -> range:
        """The numbers of this rank's slots."""
        size = self.num_slots // self.ep.size
        return range(self.ep.rank * size, (self.ep.rank + 1) * size)

    def counted(self, grad: Tensor) -> Tensor:
        """Return the rows of a gradient `grad_N...` whose slot is the lowest one of its expert."""
        return grad[list(self.shards["gate"].counted)]

    def slots_of(self, experts: Tensor) -> Tensor:
        """Return the slot of every choice of `experts_TK`; an expert's replicas take turns, from this rank's number on.

        Raises:
            ValueError: an expert does not exist, or a token has chosen one twice.
        """
        check_choices(experts, self.num_experts)
        flat = experts.flatten()
        turn = nn.functional.one_hot(flat, self.num_experts).cumsum(0).gather(1, flat[:, None])[:, 0] - 1
        return self.expert_slots[flat, (turn + self.ep.rank) % self.counts[flat]].view_as(experts)

    @torch.no_grad()
    def sum_replicas(self) -> None:
        """Replace each replica's gradient by the sum over its expert's replicas; all ranks of ep call this.

        Call it once per step, after the last backward (`reduce_gradients` does).
        """
        for parameter in self.weights:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.sum_slots([parameter.grad for parameter in self.weights if parameter.grad is not None])

    @property
    def has_replicas(self) -> bool:
        """Whether an expert lies in several slots."""
        return self.num_slots > self.num_experts

    @torch.no_grad()
    def sum_slots(self, tensors: Sequence[Tensor]) -> None:
        """Replace the rows of tensors `[slots, ...]` by the sum over their expert's replicas; all ranks of ep call it.

        Replicas get the same bits, whatever rows lie beside them.
        """
        if not self.has_replicas:
            return
        replicas = [slots for slots in slots_by_expert(self.table) if len(slots) > 1]
        start, numel = self.span.start, sum(tensor[0].numel() for tensor in tensors)
        local = {slot: flat_slot(tensors, slot - start) for slot in self.span}
        totals = _sum_parts(local, replicas, numel, self.num_slots // self.ep.size, self.ep)
        for slot, total in totals.items():
            fill_slot(tensors, slot - start, total)

    def collect_slots(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors `[slots, ...]` with a row for each expert that this rank has without a placement.

        All ranks of ep call this; of replicas one is taken.
        """
        experts = list(range(self.num_experts))
        found: list[Tensor] = take_slots(self.table, experts, tensors, self.ep)
        return found

    def extra_repr(self) -> str:
        """Return the numbers of experts and slots, and the experts here."""
        here = [self.table[slot] for slot in self.span]
        return f"{self.num_experts} experts in {self.num_slots} slots, here {here}, {tuple(self.gate.shape[1:])}"


def check_placement(placement: ExpertPlacement, layer: int, num_experts: int, ep_size: int) -> None:
    """Refuse a placement that does not fit a layer; it can be called before any process starts.

    Raises:
        ValueError: naming the rule and the values.
    """
    table = placement.physical_to_logical
    if not 0 <= layer < len(table):
        raise ValueError(f"the placement has layers 0 to {len(table) - 1}, got layer {layer}")
    if placement.counts.shape[1] != num_experts or set(table[layer].tolist()) != set(range(num_experts)):
        raise ValueError(
            f"a placement has a slot for each of {num_experts} experts, got {table[layer].tolist()}; make it from the "
            f"loads of {num_experts} experts"
        )
    if len(table[layer]) % ep_size:
        fitting = -(-len(table[layer]) // ep_size) * ep_size
        raise ValueError(f"slots divide among the ranks, got {len(table[layer])} on {ep_size}; use {fitting} slots")


def slots_by_expert(table: list[int]) -> list[list[int]]:
    """Return the slots of every expert, in order.

    >>> slots_by_expert([1, 0, 1])
    [[1], [0, 2]]
    """
    found: list[list[int]] = [[] for _ in range(max(table) + 1)]
    for slot, expert in enumerate(table):
        found[expert].append(slot)
    return found


def flat_slot(tensors: Iterable[Tensor], row: int) -> Tensor:
    """Return row `row` of all tensors as one flat block."""
    return torch.cat([tensor[row].reshape(-1) for tensor in tensors])


def fill_slot(tensors: Iterable[Tensor], row: int, block: Tensor) -> None:
    """Write a flat block back into row `row` of all tensors."""
    tensors = list(tensors)
    for tensor, part in zip(tensors, block.split([tensor[row].numel() for tensor in tensors]), strict=True):
        tensor[row].copy_(part.view_as(tensor[row]))


def sources(old: list[int], new: list[int], ep_size: int) -> list[int]:
    """Return for every new slot the old slot whose weights it takes; needs no rank.

    The same slot if it keeps its expert, else one of the same rank, else the expert's old slots in turn.

    >>> sources([0, 1, 2, 3], [0, 1, 2, 0, 3, 0], 2)
    [0, 1, 2, 0, 3, 0]
    """
    where, turns = slots_by_expert(old), [0] * (max(old) + 1)
    before, after, found = len(old) // ep_size, len(new) // ep_size, []
    for slot, expert in enumerate(new):
        here = [other for other in where[expert] if other // before == slot // after]
        if len(old) == len(new) and old[slot] == expert:
            found.append(slot)
        elif here:
            found.append(here[0])
        else:
            found.append(where[expert][turns[expert] % len(where[expert])])
            turns[expert] += 1
    return found


@torch.no_grad()
def take_slots(old: list[int], new: list[int], tensors: Iterable[Tensor], ep: ExpertParallel) -> list[Tensor]:
    """Return this rank's rows of tensors `[slots, ...]` under a new table of slots; all ranks of `ep` call this.

    Args:
        old: the expert in each slot before.
        new: the expert in each slot after.
        tensors: weights and optimizer state with one row per old slot of this rank, all of one type.
        ep: the ranks.
    """
    tensors = [tensor.detach() for tensor in tensors]
    before, after, rank = len(old) // ep.size, len(new) // ep.size, ep.rank
    numel = sum(tensor[0].numel() for tensor in tensors)
    pairs = [(source, slot) for slot, source in enumerate(sources(old, new, ep.size))]
    transfers = [Transfer(a // before, b // after, (a, b), numel) for a, b in pairs if a // before != b // after]
    arrived = exchange_blocks(transfers, lambda item: flat_slot(tensors, item[0] - rank * before), tensors[0], ep)
    made = [tensor.new_empty(after, *tensor.shape[1:]) for tensor in tensors]
    for source, slot in pairs[rank * after : (rank + 1) * after]:
        is_here = source // before == rank
        block = flat_slot(tensors, source - rank * before) if is_here else arrived[source, slot]
        fill_slot(made, slot - rank * after, block)
    return made


def place_experts(model: nn.Module, placement: ExpertPlacement) -> list[PlacedExperts]:
    """Put the experts of every MoE layer of a model where a placement says; returns the new layers, in order.

    All ranks call this, after the weights are drawn or loaded and before the optimizer is made.

    Raises:
        ValueError: another number of layers than in the placement, or as `PlacedExperts`; then nothing has changed.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, MoE)]
    if len(layers) != len(placement.physical_to_logical):
        raise ValueError(
            f"a placement has one row for each MoE layer, got {len(placement.physical_to_logical)} rows for "
            f"{len(layers)} layers"
        )
    for number, layer in enumerate(layers):
        check_placement(placement, number, layer.experts.num_experts, layer.experts.ep.size)
        if isinstance(layer.experts, PlacedExperts):
            raise ValueError("the experts have a placement already; move_experts changes it")
    for number, layer in enumerate(layers):
        layer.experts = PlacedExperts(layer.experts, placement, number)
    return [layer.experts for layer in layers if isinstance(layer.experts, PlacedExperts)]


@torch.no_grad()
def collect_experts(model: nn.Module) -> None:
    """Put every placed layer of a model back into plain shards, expert by number.

    All ranks call this; an optimizer that was made before holds the old parameters.
    """
    for layer in model.modules():
        if isinstance(layer, MoE) and isinstance(layer.experts, PlacedExperts):
            placed = layer.experts
            check_divides(placed.num_experts, placed.ep.size)
            plain = Experts(
                placed.gate.shape[2], placed.gate.shape[1], placed.num_experts, placed.ep, placed.gate.dtype
            )
            for parameter, row in zip(plain.weights, placed.collect_slots(placed.weights), strict=True):
                parameter.copy_(row)
            layer.experts = plain


def _sum_parts(
    local: dict[int, Tensor], replicas: list[list[int]], numel: int, slots_per_rank: int, ep: ExpertParallel
) -> dict[int, Tensor]:
    """Reduce-scatter and all-gather the blocks of each list of slots; returns the sums of this rank's slots."""
    like = next(iter(local.values()))
    number = {slot: (q, slots) for slots in replicas for q, slot in enumerate(slots)}

    def part(slot: int) -> slice:  # of a block: the share that this slot adds up
        q, slots = number[slot]
        return slice(q * numel // len(slots), (q + 1) * numel // len(slots))

    def transfers(owner: int) -> list[Transfer]:  # owner 1: the target adds up; 0: the source has added up
        pairs = [pair for slots in replicas for pair in ((a, b) for a in slots for b in slots)]
        sizes = [part(pair[owner]) for pair in pairs]
        ranks = [(a // slots_per_rank, b // slots_per_rank) for a, b in pairs]
        return [
            Transfer(*where, pair, size.stop - size.start)
            for where, pair, size in zip(ranks, pairs, sizes, strict=True)
        ]

    found = exchange_blocks(transfers(1), lambda item: local[item[0]][part(item[1])], like, ep)
    here = [slot for slot in local if slot in number]
    totals = {}
    for slot in here:
        totals[slot] = torch.zeros_like(local[slot][part(slot)])
        for other in number[slot][1]:  # in the order of the slots, on every rank alike
            totals[slot] += found[other, slot]
    gathered = exchange_blocks(transfers(0), lambda item: totals[item[0]], like, ep)
    return {slot: torch.cat([gathered[other, slot] for other in number[slot][1]]) for slot in here}


def trivial_placement(num_experts: int, num_layers: int = 1) -> ExpertPlacement:
    """Return the placement without replicas, expert i in slot i.

    >>> trivial_placement(3).physical_to_logical.tolist()
    [[0, 1, 2]]
    """
    return make_placement(torch.arange(num_experts).repeat(num_layers, 1).numpy(), num_experts)
