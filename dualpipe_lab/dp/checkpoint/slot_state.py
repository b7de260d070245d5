"""The shards of experts in slots: a checkpoint has each expert once, by its number, and any placement reads it.

Chapter: book/ep/moving-experts.  In: an optimizer whose declaration has slots.  Out: as of `sharded_state_dict`.
  save    weights and state are gathered over the copies and collected from the slots: experts r E / e to (r + 1) E / e
          on rank r of ep, a share of them on each copy, in memory beside the slots until they are written
  load    each slot reads the rows of its expert; no message
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab.dp.buckets import Bucket
from dualpipe_lab.dp.checkpoint.region import ShardRegion
from dualpipe_lab.dp.layout import Layout
from dualpipe_lab.dp.sharded import ShardedOptimizer
from dualpipe_lab.dp.slots import Held, Slots, rows_between
from dualpipe_lab.dp.zero3 import Zero3


class SlotState(NamedTuple):
    """Elements of a kind of state of experts, as a flat view, and where they lie in the full tensor."""

    kind: str
    parameter: nn.Parameter
    region: ShardRegion
    view: Tensor


def slots_of(optimizer: ShardedOptimizer) -> Slots:
    """Return the parameters of an optimizer that lie in slots; without a mesh there are none."""
    return Slots(nn.Module(), ()) if optimizer.declaration is None else optimizer.declaration.slots


def slots_to_save(optimizer: ShardedOptimizer, slots: Slots) -> Iterator[SlotState]:
    """Yield this rank's share of the experts; every rank calls this, and reads it to the end."""
    for held in _held(optimizer, slots):
        size, rank = comm.get_world_size(held.bucket.group), comm.get_rank(held.bucket.group)
        for kind in held.tensors:
            views = held.bucket.views(held.gathered(kind))
            for layer, numbers in slots.layers_in(held.bucket):
                for number, rows in zip(numbers, layer.collect_slots([views[n] for n in numbers]), strict=True):
                    parameter = held.bucket.parameters[number]
                    shard = slots.shard(parameter)
                    start = shard.start // len(shard.here) * len(rows)
                    first, last = Layout([rows.numel()], size).span(rank)
                    region = ShardRegion(shard.full_shape(rows), 0, start, start + len(rows), first, last)
                    if first < last:
                        yield SlotState(kind, parameter, region, rows.view(-1)[first:last])


def slots_to_load(optimizer: ShardedOptimizer, slots: Slots) -> Iterator[SlotState]:
    """Yield a view of every slot's part in this rank's shards."""
    for held in _held(optimizer, slots):
        for number, first, last in held.bucket.layout.tensors_between(held.start, held.stop):
            parameter, offset = held.bucket.parameters[number], held.bucket.layout.offsets[number] - held.start
            if parameter not in slots:
                continue
            shard, size = slots.shard(parameter), parameter.numel() // len(parameter)
            for row, low, high in rows_between(parameter, first, last):
                expert, begin = shard.here[row], row * size
                region = ShardRegion(shard.full_shape(parameter), 0, expert, expert + 1, low - begin, high - begin)
                for kind, tensor in held.tensors.items():
                    yield SlotState(kind, parameter, region, tensor[offset + low : offset + high])


def _held(optimizer: ShardedOptimizer, slots: Slots) -> Iterator[Held]:
    """Yield all buckets with slots, those of frozen weights last."""
    seen: set[nn.Parameter] = set()
    for shard in optimizer.local_shards:
        seen.update(shard.bucket.parameters)
        if slots.layers_in(shard.bucket):
            yield Held(shard.bucket, shard.start, shard.stop, shard.adam.state_dict(), optimizer.is_sharded)
    if isinstance(optimizer, Zero3):
        for flat in optimizer.flats:
            if not flat.is_trained and slots.layers_in(flat.bucket):
                span = flat.bucket.layout.span(comm.get_rank(flat.bucket.group))
                yield Held(flat.bucket, *span, {"parameter": flat.shard}, True)
        return
    for parameter in optimizer.names:
        if parameter in slots and parameter not in seen:
            bucket = Bucket([parameter], group=optimizer.adam.group_of(parameter))
            yield Held(bucket, 0, parameter.numel(), {"parameter": parameter.detach().view(-1)}, False)
