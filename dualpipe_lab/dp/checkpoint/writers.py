"""Which rank writes which shard: every element of every tensor once, and nothing that could not be read.

Chapter: book/dp/io.  In: what each rank says about its shards.  Out: the index's tensors; or what is wrong.
  one shard on several ranks      the first rank writes; a sample of weights and buffers must agree: copies may drift
                                  apart by rounding, and other layers, or statistics of other data, are not alike in 1%
  copies that lie otherwise       (a key head's replica, a mirror, a tied weight under ZeRO) are left out
  the rest                        must be the full tensor, once
"""

from collections.abc import Sequence
from math import isfinite, prod
from typing import NamedTuple

from torch import Tensor

from dualpipe_lab.dp.checkpoint.index import CheckpointError, StoredShard, TensorEntry
from dualpipe_lab.dp.checkpoint.reader import type_name
from dualpipe_lab.dp.checkpoint.region import ShardRegion
from dualpipe_lab.dp.checkpoint.state import SavedShard

_SAMPLE, _ALIKE = 16, 0.01  # elements of a weight, and their relative difference, that tell copies from other layers
_REMEDY = "give each its own name with shard_spec_of, or by `names_start_here` of the stages and `shards` of the layers"
_BUFFER_REMEDY = "average it over the ranks before the save, give each its own name, or register it persistent=False"


class Claim(NamedTuple):
    """What a rank says about one of its shards before the save: where it lies, and a sample of a weight or buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    region: ShardRegion
    sample: tuple[float, ...] = ()
    is_copy: bool = False


def claim_of(shard: SavedShard) -> Claim:
    """Describe a shard to the other ranks."""
    dtype = type_name(shard.view.dtype)
    sample = sample_of(shard.view) if shard.name.startswith(("parameter/", "buffer/")) else ()
    return Claim(shard.name, shard.shape, dtype, shard.region, sample, shard.is_copy)


def sample_of(view: Tensor) -> tuple[float, ...]:
    """Return some elements, spread over a flat tensor."""
    return tuple(view.detach()[:: max(1, view.numel() // _SAMPLE)].double().tolist())


def are_alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether two samples may be of copies of one weight.

    >>> are_alike([1.0, -2.0], [1.0, -2.000001]), are_alike([1.0, -2.0], [1.0, -2.1])
    (True, False)
    """
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if isfinite(a) and isfinite(b)]
    largest = max((abs(number) for pair in pairs for number in pair), default=0.0)
    return all(abs(a - b) <= _ALIKE * largest for a, b in pairs)


def assign_writers(claims_by_rank: list[list[Claim]]) -> dict[str, TensorEntry]:
    """Assign every shard to one rank.

    Raises:
        CheckpointError: what would be written could not be read, or is not what every rank holds.
    """
    tensors: dict[str, TensorEntry] = {}
    first: dict[tuple[str, ShardRegion], tuple[int, Claim]] = {}  # by rank
    ranked = [(rank, claim) for rank, claims in enumerate(claims_by_rank) for claim in claims]
    for rank, claim in sorted(ranked, key=lambda one: one[1].is_copy):
        name, region = claim.name, claim.region
        entry = tensors.setdefault(name, TensorEntry(claim.dtype, claim.shape))
        if (entry.dtype, entry.shape) != (claim.dtype, claim.shape):
            raise CheckpointError(
                f"tensor {name} is {claim.dtype} {claim.shape} on rank {rank} and {entry.dtype} {entry.shape} on "
                f"another; {_REMEDY}"
            )
        if (name, region) in first:
            writer, written = first[name, region]
            if not are_alike(written.sample, claim.sample):
                raise CheckpointError(
                    f"tensor {name} has other values on rank {rank} than on rank {writer}; if they are copies, they "
                    f"must be alike; else {_BUFFER_REMEDY if name.startswith('buffer/') else _REMEDY}"
                )
        elif not claim.is_copy or (region.numel and not any(_overlap(region, s.region) for s in entry.shards)):
            first[name, region] = rank, claim
            entry.shards.append(StoredShard(file_of(rank), region))
    for name, entry in tensors.items():
        _check_full(name, entry)
    return tensors


def file_of(rank: int) -> str:
    """Return the name of a rank's file.

    >>> file_of(3)
    'rank-00003.safetensors'
    """
    return f"rank-{rank:05d}.safetensors"


def _overlap(one: ShardRegion, other: ShardRegion) -> bool:
    if one[:4] == other[:4]:  # parts of one slice
        return one.first < other.last and other.first < one.last
    return other.numel > 0 and one.start < other.stop and other.start < one.stop


def _check_full(name: str, entry: TensorEntry) -> None:
    held, numel = sum(shard.region.numel for shard in entry.shards), prod(entry.shape)
    if held != numel:
        raise CheckpointError(
            f"the shards of tensor {name} have {held} elements, and the tensor has {numel}: some are missing or held "
            f"twice; save with all ranks of the model, and {_REMEDY}"
        )
    if len({shard.file for shard in entry.shards}) < len(entry.shards):
        raise CheckpointError(f"one rank has two shards of tensor {name}, and a file holds one; {_REMEDY}")
