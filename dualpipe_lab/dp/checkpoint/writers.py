"""Which rank writes which shard: every element of every tensor once, and nothing that could not be read.

Chapter: book/dp/io.  In: what each rank says about its shards.  Out: the index's tensors; or what is wrong.
  equal shards of several ranks   the first rank writes; a sample of their values must be equal
  copies that lie otherwise       (a key head's replica, a mirror, a tied weight under ZeRO) are left out
  the rest                        must be the full tensor, once
"""

import zlib
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from dualpipe_lab.dp.checkpoint.index import CheckpointError, StoredShard, TensorEntry
from dualpipe_lab.dp.checkpoint.reader import type_name
from dualpipe_lab.dp.checkpoint.region import ShardRegion
from dualpipe_lab.dp.checkpoint.state import SavedShard

_SAMPLE = 64  # elements that tell copies from other layers
_REMEDY = "give each its own name with shard_spec_of, or by `names_start_here` of the stages and `shards` of the layers"


class Claim(NamedTuple):
    """What a rank says about one of its shards before the save: where it lies, and the checksum of a sample of it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    region: ShardRegion
    checksum: int | None
    is_copy: bool = False


def claim_of(shard: SavedShard) -> Claim:
    """Describe a shard to the other ranks; buffers may differ between ranks, and the first one's are saved."""
    checksum = None if shard.name.startswith("buffer/") else sample_checksum(shard.view)
    return Claim(shard.name, shard.shape, type_name(shard.view.dtype), shard.region, checksum, shard.is_copy)


def sample_checksum(view: Tensor) -> int:
    """Return the CRC-32 of some elements, spread over a flat tensor: copies have the same, other layers another one.

    >>> sample_checksum(torch.zeros(1000)) == sample_checksum(torch.arange(1000.0))
    False
    """
    sample = view.detach()[:: max(1, view.numel() // _SAMPLE)].cpu().contiguous()
    return zlib.crc32(sample.view(torch.uint8).numpy().data)


def assign_writers(claims_by_rank: list[list[Claim]]) -> dict[str, TensorEntry]:
    """Assign every shard to one rank.

    Raises:
        CheckpointError: what would be written could not be read, or is not what every rank holds.
    """
    tensors: dict[str, TensorEntry] = {}
    first: dict[tuple[str, ShardRegion], tuple[int, int | None]] = {}  # rank, checksum
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
            writer, checksum = first[name, region]
            if checksum != claim.checksum:
                raise CheckpointError(
                    f"tensor {name} has other values on rank {rank} than on rank {writer}; if they are copies, they "
                    f"must be equal; else {_REMEDY}"
                )
        elif not (claim.is_copy and any(_overlap(region, shard.region) for shard in entry.shards)):
            first[name, region] = rank, claim.checksum
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
    return one.numel > 0 < other.numel and one.start < other.stop and other.start < one.stop


def _check_full(name: str, entry: TensorEntry) -> None:
    held, numel = sum(shard.region.numel for shard in entry.shards), prod(entry.shape)
    if held != numel:
        raise CheckpointError(
            f"the shards of tensor {name} have {held} elements, and the tensor has {numel}: some are missing or held "
            f"twice; save with all ranks of the model, and {_REMEDY}"
        )
    if len({shard.file for shard in entry.shards}) < len(entry.shards):
        raise CheckpointError(f"one rank has two shards of tensor {name}, and a file holds one; {_REMEDY}")
