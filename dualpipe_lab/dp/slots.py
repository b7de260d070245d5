"""Parameters whose rows lie in slots: one expert may lie in several slots, here and on other ranks, as replicas.

Chapter: book/ep/moving-experts.  In: a declaration, flat shards of any stage of ZeRO.  Out: sums, counts, moved state.
  gradients    after the sum over the copies of a slot (edp), the sum over the replicas of an expert, in the order of
               the slots: replicas get the same bits, so their weights and moments stay equal
  norm         of an expert the lowest slot counts
  ZeRO         replicas lie in other shards, so a bucket with replicas is gathered, summed, and sharded again: an
               all-gather over edp per step, (edp - 1) / edp of the bucket's bytes; a move does so for weights and state
A layer says `slots` in its `shards`, and offers what `SlotLayer` names.  A move changes the `shards`, so that they are
read anew each time.
Elsewhere: no counterpart in training frameworks that we looked into.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, cast

from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.dp.buckets import Bucket, local_shard
from dualpipe_lab.tp.shard import Shard, declared_shards


class SlotLayer(Protocol):
    """A layer with one row for each slot in some of its parameters; all ranks of its ep group call its methods."""

    @property
    def has_replicas(self) -> bool:
        """Whether an expert lies in several slots."""

    def sum_slots(self, tensors: Sequence[Tensor]) -> None:
        """Replace rows `[slots, ...]` of each tensor by the sum over the replicas of their expert, in place."""

    def collect_slots(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return rows of slots as rows of experts, of which this rank has the range that it has without slots."""


class Held(NamedTuple):
    """State by name of elements `start` to `stop` of a bucket: flat tensors, padded where they are `is_sharded`."""

    bucket: Bucket
    start: int
    stop: int
    tensors: dict[str, Tensor]
    is_sharded: bool

    def gathered(self, kind: str) -> Tensor:
        """Return the full flat buffer of one kind of state; all ranks of the bucket's group call this."""
        return gathered(self.bucket, self.tensors[kind], self.is_sharded)


class Slots:
    """The parameters of a module that lie in slots, with their layers.

    Args:
        module: this rank's part of the model.
        groups: the ranks with copies of the same slots.

    Raises:
        ValueError: copies of a layer have other experts in their slots.
    """

    def __init__(self, module: nn.Module, groups: Iterable[Group]) -> None:
        self._owner: dict[nn.Parameter, tuple[nn.Module, str]] = {
            layer.get_parameter(name): (layer, name)
            for layer in module.modules()
            for name, shard in declared_shards(layer).items()
            if shard.slots
        }
        for group in groups if self._owner else ():
            self._check_agreed(group)

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._owner)

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._owner

    def __bool__(self) -> bool:
        return bool(self._owner)

    def shard(self, parameter: nn.Parameter) -> Shard:
        """Return the slots of a parameter under the placement in force."""
        layer, name = self._owner[parameter]
        return declared_shards(layer)[name]

    def layers_in(self, bucket: Bucket) -> list[tuple[SlotLayer, list[int]]]:
        """Return the layers that have slots in a bucket, each with the numbers of its parameters there."""
        found: dict[nn.Module, list[int]] = {}
        for number, parameter in enumerate(bucket.parameters):
            if parameter in self:
                found.setdefault(self._owner[parameter][0], []).append(number)
        return [(cast(SlotLayer, layer), numbers) for layer, numbers in found.items()]

    def sum_replicas(self, held: Iterable[tuple[Bucket, Tensor]], is_sharded: bool) -> None:
        """Add the gradients of replicas, in place; every rank calls this after the sums over copies.

        Args:
            held: each bucket and this rank's summed gradient of it: the flat buffer, or its shard.
            is_sharded: which of the two.
        """
        for bucket, grad in held:
            layers = [found for found in self.layers_in(bucket) if found[0].has_replicas]
            if not layers:
                continue
            full = gathered(bucket, grad, is_sharded)
            views = bucket.views(full)
            for layer, numbers in layers:
                layer.sum_slots([views[number] for number in numbers])
            if is_sharded:
                grad.copy_(local_shard(full, bucket.group))

    def counted(self, bucket: Bucket, start: int, stop: int, flat: Tensor) -> Iterator[Tensor]:
        """Yield the parts of elements `start` to `stop` of a bucket that norms count: of replicas the lowest slot's."""
        for number, first, last in bucket.layout.tensors_between(start, stop):
            parameter, offset = bucket.parameters[number], bucket.layout.offsets[number] - start
            if parameter not in self:
                yield flat[offset + first : offset + last]
                continue
            counted = self.shard(parameter).counted
            for row, low, high in rows_between(parameter, first, last):
                if row in counted:
                    yield flat[offset + low : offset + high]

    def check_rounding(self, seed: int | None) -> None:
        """Refuse to round at random: replicas lie in other shards, and would be rounded apart."""
        if self and seed is not None:
            raise ValueError(
                f"replicas of experts must be rounded alike, and each shard draws numbers of its own, got "
                f"rounding_seed={seed} for experts with a placement; use master=True"
            )

    def _check_agreed(self, group: Group) -> None:
        here = [self.shard(parameter).slots for parameter in self._owner]
        for rank, there in enumerate(comm.all_gather_object(here, group)):
            if there != here:
                raise ValueError(
                    f"copies of a layer have the same experts in their slots, got {here[0]} here and "
                    f"{there[0] if there else ()} on copy {rank}; give all ranks one placement"
                )


def rows_between(parameter: Tensor, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Yield each row that has elements `first` to `last` of a flattened parameter, and where they begin and end.

    >>> import torch
    >>> list(rows_between(torch.empty(3, 4), 2, 9))
    [(0, 2, 4), (1, 4, 8), (2, 8, 9)]
    """
    size = parameter.numel() // len(parameter)
    for row in range(first // size, -(-last // size)):
        yield row, max(first, row * size), min(last, (row + 1) * size)


def gathered(bucket: Bucket, flat: Tensor, is_sharded: bool) -> Tensor:
    """Return the full flat buffer, given this rank's shard of it; `flat` itself where it is the full one."""
    if not is_sharded:
        return flat
    full = flat.new_empty(bucket.layout.padded_numel)
    comm.all_gather_single(full, flat.contiguous(), bucket.group)
    return full
