"""Experts that move while training goes on: weights and optimizer state of the slots that a new plan changes.

Chapter: book/ep/moving-experts.  In: placed layers, the loads of the last steps.  Out: the same layers, moved.
  plan     `rebalance_sticky` from the placement in force: at most `max_moves` slots of a layer change
  move     a slot whose expert changes takes the weights of one of the expert's old slots, and their two moments
  bytes    slots from another rank * 3 h f * (bytes of a weight + bytes of its optimizer state), in one all-to-all per
           layer and type of number
  ZeRO     shards end inside of experts: their ranks gather weights and state of the layer's buckets over edp, move the
           rows, and keep their shards again
Replicas are equal to the last bit, with their moments, so it does not matter which of them sends.  A move changes where
tokens are computed, and no result: the steps after it are those of a run that does not move, but for rounding.
Elsewhere: vLLM `rearrange_expert_weights_inplace` moves the weights of a model that serves; nobody trains there.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from dualpipe_lab import comm
from dualpipe_lab.dp.adam import AdamW
from dualpipe_lab.dp.buckets import local_shard
from dualpipe_lab.dp.flat_parameter import is_absent
from dualpipe_lab.dp.sharded import LocalShard, ShardedOptimizer
from dualpipe_lab.dp.slots import gathered
from dualpipe_lab.ep.eplb.placement import ExpertPlacement, make_placement, rank_loads
from dualpipe_lab.ep.eplb.sticky import num_moves, rebalance_sticky
from dualpipe_lab.ep.moe.layer import Experts
from dualpipe_lab.ep.placed_experts import NAMES, PlacedExperts, check_placement, slots_by_expert, sources, take_slots

Optimizer: TypeAlias = AdamW | torch.optim.Optimizer | ShardedOptimizer


class Moved(NamedTuple):
    """The result of `rebalance` for one layer.

    Attributes:
        num_slots: the slots whose expert changed, of all ranks together.
        sent_bytes: weights and optimizer state of slots that this rank sent to other ranks, without ZeRO's gathers.
        before: `load_N` of the ranks under the placement before.
        after: the same loads under the placement after.
    """

    num_slots: int
    sent_bytes: int
    before: Tensor
    after: Tensor


def rebalance(
    layers: Sequence[PlacedExperts],
    loads: Sequence[Tensor],
    optimizer: Optimizer | None,
    max_moves: int,
    num_nodes: int = 1,
) -> list[Moved]:
    """Plan from new loads, change few slots of each layer, and move weights and optimizer state; all ranks call this.

    Call it between two steps; gradients of the layers are dropped.

    Args:
        layers: of one model, as `place_experts` returns them.
        loads: `load_E` of each layer, summed over all ranks with different data, such as `update_biases` returns.
        optimizer: holds the weights: dp.AdamW, one of torch.optim, Ddp or ZeRO-1 to 3; None where nothing is trained.
        max_moves: slots of a layer that may change.
        num_nodes: of the ranks of ep; experts stay on their node.

    Raises:
        ValueError: loads that differ between ranks or are not one for each layer, or as `move_experts`.
    """
    if len(layers) != len(loads) or not layers:
        raise ValueError(f"every layer has a load, got {len(layers)} layers and {len(loads)} loads")
    weight = torch.stack([load.detach().cpu().double() for load in loads])
    _check_agreed(weight, layers[0])
    tables, size = torch.tensor([layer.table for layer in layers]), layers[0].ep.size
    old = make_placement(tables.numpy(), weight.shape[1])
    new = rebalance_sticky(weight, tables, size, max_moves, num_nodes)
    sent = [move_experts(layer, new, optimizer, number) for number, layer in enumerate(layers)]
    changed = num_moves(tables, new.physical_to_logical).tolist()
    both = (rank_loads(weight, placement, size) for placement in (old, new))
    return [Moved(*each) for each in zip(changed, sent, *both, strict=True)]


@torch.no_grad()
def move_experts(
    layer: PlacedExperts,
    placement: ExpertPlacement,
    optimizer: Optimizer | None = None,
    number: int = 0,
) -> int:
    """Change a layer's placement, with weights and optimizer state; returns the bytes of slots that this rank sent.

    Args:
        layer: the placed experts; all ranks that hold the layer call this, between two steps.
        placement: with as many slots as before.
        optimizer: holds the weights, and a moving average if there is one; None where nothing is trained.
        number: of the layer in the placement.

    Raises:
        ValueError: another number of slots, or an optimizer whose state is not one tensor of each weight's shape.
    """
    check_placement(placement, number, layer.num_experts, layer.ep.size)
    old, new = layer.table, placement.physical_to_logical[number].tolist()
    if len(new) != len(old):
        raise ValueError(f"a move keeps the number of slots, got {len(new)} for {len(old)}; collect and place anew")
    sent = 0
    if isinstance(optimizer, ShardedOptimizer):
        sent = _move_shards(layer, old, new, optimizer)
    else:
        tensors = [p.detach() for p in layer.weights]
        tensors += [state for parameter in layer.weights for state in state_of(optimizer, parameter)]
        sent = _move_rows(layer, old, new, tensors)
    layer.set_placement(placement, number)
    for parameter in layer.weights:
        parameter.grad = None  # it belonged to the experts that were here before
    return sent


def _move_rows(layer: PlacedExperts, old: list[int], new: list[int], tensors: Sequence[Tensor]) -> int:
    """Move the rows of tensors `[slots, ...]`, in place; returns the bytes that this rank sent."""
    if old == new:
        return 0
    slots, sent = len(old) // layer.ep.size, 0
    leaving = [slot for slot, source in enumerate(sources(old, new, layer.ep.size)) if source in layer.span]
    num_sent = sum(slot // slots != layer.ep.rank for slot in leaving)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        some = [tensor for tensor in tensors if tensor.dtype == dtype]
        for tensor, rows in zip(some, take_slots(old, new, some, layer.ep), strict=True):
            tensor.copy_(rows)
        sent += num_sent * sum(tensor[0].numel() * tensor.element_size() for tensor in some)
    return sent


def _move_shards(layer: PlacedExperts, old: list[int], new: list[int], optimizer: ShardedOptimizer) -> int:
    """Move weights and state that lie in flat buffers: gathered over the copies, moved, and sharded again."""
    held = _shards_of(layer, optimizer)
    if old == new:
        return 0
    tensors, weights, kept = [], [], []
    for shard in held:
        for kind, flat in shard.adam.state_dict().items():
            full = gathered(shard.bucket, flat, optimizer.is_sharded)
            views = zip(shard.bucket.parameters, shard.bucket.views(full), strict=True)
            ours = [(parameter, view) for parameter, view in views if any(parameter is p for p in layer.weights)]
            tensors += [view for _, view in ours]
            weights += ours if kind == "parameter" else []
            kept.append((shard, flat, full))
    sent = _move_rows(layer, old, new, tensors)
    for shard, flat, full in kept:
        if optimizer.is_sharded:
            flat.copy_(local_shard(full, shard.bucket.group))
        shard.adam.round()  # from the master copy, if there is one
    for parameter, view in weights:
        if not is_absent(parameter):  # ZeRO-3 gathers it for the next forward
            parameter.copy_(view)
    return sent


def _shards_of(layer: PlacedExperts, optimizer: ShardedOptimizer) -> list[LocalShard]:
    """Return this rank's shards of the buckets in which a layer's weights lie."""
    slots = None if optimizer.declaration is None else optimizer.declaration.slots
    if slots is None or any(parameter not in slots for parameter in layer.weights):
        raise ValueError(
            f"{type(optimizer).__name__} does not hold the experts' slots; make the optimizer over the Mesh, after "
            "place_experts"
        )
    if not all(parameter.requires_grad for parameter in layer.weights):
        raise ValueError("frozen experts have no state, and ZeRO-3 shards them; move them before the optimizer is made")
    members = {id(parameter) for parameter in layer.weights}
    return [s for s in optimizer.local_shards if any(id(parameter) in members for parameter in s.bucket.parameters)]


def state_of(optimizer: Optimizer | None, parameter: Tensor) -> list[Tensor]:
    """Return the optimizer state that has one number for each of a parameter's.

    Raises:
        ValueError: an optimizer of another kind, or one that does not hold the parameter.
    """
    if optimizer is None:
        return []
    if isinstance(optimizer, AdamW):
        held = [state for p, state in zip(optimizer.parameters, optimizer.moments, strict=True) if p is parameter]
        if held:
            return list(held[0])
    elif isinstance(optimizer, torch.optim.Optimizer):
        if any(p is parameter for group in optimizer.param_groups for p in group["params"]):
            found = optimizer.state.get(parameter, {}).values()
            return [value for value in found if isinstance(value, Tensor) and value.shape == parameter.shape]
    else:
        raise ValueError(
            f"experts move with dp.AdamW, an optimizer of torch.optim, Ddp or ZeRO, got {type(optimizer).__name__}"
        )
    raise ValueError(
        f"{type(optimizer).__name__} does not hold the experts' weights; make the optimizer after place_experts"
    )


@torch.no_grad()
def full_experts(experts: Experts, of: str = "parameter") -> dict[str, Tensor]:
    """Gather the weights, or with "grad" the gradients, of all experts on every rank of ep: `gate_EFD`, and so on.

    Of an expert with replicas the lowest slot is taken; call `reduce_gradients` first.
    """
    placed = experts.table if isinstance(experts, PlacedExperts) else list(range(experts.num_experts))
    firsts, found = [slots[0] for slots in slots_by_expert(placed)], {}
    for name in NAMES:
        parameter = experts.get_parameter(name)
        tensor = parameter if of == "parameter" else parameter.grad
        if tensor is not None:
            full = tensor.new_empty(len(placed), *tensor.shape[1:])
            comm.all_gather_single(full.view(-1), tensor.detach().reshape(-1).contiguous(), experts.ep.group)
            found[name] = full[firsts]
    return found


def _check_agreed(loads: Tensor, layer: PlacedExperts) -> None:
    """Refuse loads that differ between ranks: each rank would make a plan of its own, and wait for other messages."""
    largest = torch.stack([loads, -loads]).to(layer.gate.device)
    for group in [layer.ep.group] + ([] if layer.ep.edp_group is None else [layer.ep.edp_group]):
        comm.all_reduce(largest, "max", group)
    if not torch.equal(largest[0], -largest[1]):
        raise ValueError(
            "a plan is made from the loads of all ranks, and these loads differ between ranks; sum them first, as "
            "update_biases does"
        )
