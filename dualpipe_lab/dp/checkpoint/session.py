"""`save` and `load`: all ranks of a group call them together.

Chapter: book/dp/io.  In: an optimizer on N ranks, a folder.  Out: a checkpoint; the state, on any number.
  save   rank 0 locks the folder -> ranks all-gather the list of their shards -> each element is assigned to one writer
         -> each rank writes a file and waits for the disk -> rank 0 writes the index and renames the folder
  load   each rank checks names, shapes and types -> reads into new memory -> compares checksums (a shard that no rank
         read completely is read once more, by one rank) -> if no rank has failed, all copy; otherwise none does
Elsewhere: torch.distributed.checkpoint (a pickled index); Megatron dist_checkpointing.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.dp.checkpoint import folder as folders
from dualpipe_lab.dp.checkpoint.file import Written, is_known, write_tensors
from dualpipe_lab.dp.checkpoint.index import INDEX, CheckpointError, Index, StoredShard, TensorEntry
from dualpipe_lab.dp.checkpoint.reader import Checkpoint, Read, metadata_of, type_name
from dualpipe_lab.dp.checkpoint.region import ShardRegion
from dualpipe_lab.dp.checkpoint.state import (
    SavedShard,
    ShardSpecOf,
    random_state,
    sample_checksum,
    set_random_state,
    sharded_state_dict,
)
from dualpipe_lab.dp.mixed_precision import LossScaler
from dualpipe_lab.dp.sharded import ShardedOptimizer
from dualpipe_lab.topology import Topology

T = TypeVar("T")


class Claim(NamedTuple):
    """What a rank says about one of its shards before the save: where it lies, and the checksum of a sample of it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    region: ShardRegion
    checksum: int | None


_REMEDY = "give each its own name with shard_spec_of, or by `names_start_here` of the stages and `shards` of the layers"


@dataclass(frozen=True)
class Restored:
    """The values of a checkpoint that are not tensors, as returned by `load`.

    Attributes:
        step: of the training.
        sampler: the position in the data, as it was passed to `save`.
        config: as it was passed to `save`.
        topology: the ranks that saved.
        reads: the bytes of each file that this rank read.
    """

    step: int
    sampler: Any
    config: Any
    topology: Topology | None
    reads: tuple[Read, ...]


def save(
    folder: Path | str,
    step: int,
    optimizer: ShardedOptimizer,
    *,
    scaler: LossScaler | None = None,
    sampler: Any = None,
    config: Any = None,
    topology: Topology | None = None,
    shard_spec_of: ShardSpecOf | None = None,
    keep: int | None = None,
    group: Group | None = None,
) -> Path:
    """Save the state of all ranks as one checkpoint, `folder/step-...`; return its path.

    Args:
        folder: on a disk that all ranks share.
        step: of the training.
        optimizer: of any stage, with its module.
        scaler: a loss scaler, whose scale and count are saved.
        sampler: the position in the data; like `config`, anything that JSON can hold.
        config: of the training.
        topology: of the ranks.
        shard_spec_of: returns the place of a parameter in the full model, by its name and value; by default layers name
            their `shards`, and a pipeline's stages say where names start (`names_start_here`).
        keep: number of checkpoints to keep, this one included; older ones are removed.
        group: the ranks that save together (default: the world).

    Raises:
        CheckpointError: the step is saved already, another save is under way, or the folder is not shared; two ranks
            have other values of the same elements, or no rank has some of them.
        ValueError: `keep` is below 1.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"keep counts from 1, got {keep}; leave it out to keep all checkpoints")
    rank, folder = comm.get_rank(group), Path(folder)
    values: dict[str, Any] = {"sampler": sampler, "config": config, "num_steps": optimizer.num_steps}
    values["scaler"] = scaler.state_dict() if scaler else None
    values["topology"] = topology.describe() if topology else None
    local = list(sharded_state_dict(optimizer, shard_spec_of))
    with ExitStack() as lock:
        made = _on_all_ranks(lambda: _begin(folder, step, values, local, lock if rank == 0 else None), group)
        hidden = folder / comm.all_gather_object(made, group)[0]
        tensors = _assign_writers(comm.all_gather_object([_claim(shard) for shard in local], group))
        written = _on_all_ranks(lambda: _write(hidden, rank, local, tensors, step), group)
        files = {_file_of(number): found for number, found in enumerate(comm.all_gather_object(written, group))}
        values["random"] = comm.all_gather_object(random_state(optimizer.adam.generator), group)
        _on_all_ranks(lambda: _finish(hidden, step, files, tensors, values, keep) if rank == 0 else None, group)
    return folder / folders.name_of(step)


def load(
    path: Path | str,
    optimizer: ShardedOptimizer,
    *,
    scaler: LossScaler | None = None,
    shard_spec_of: ShardSpecOf | None = None,
    group: Group | None = None,
) -> Restored:
    """Load a checkpoint that any number of ranks saved with any stage of ZeRO.

    Weights, moments, the number of steps, the scaler and the state of random numbers are restored.  If loading fails on
    one rank, nothing has changed on any rank.

    Args:
        path: of the checkpoint: `latest(folder)`.
        optimizer: of the same model, with the same precision.
        scaler: a loss scaler, whose scale and count are restored.
        shard_spec_of: as in `save`.
        group: the ranks that load together (default: the world).

    Raises:
        CheckpointError: naming the file and the tensor that are damaged, missing or of another model.
    """
    local = list(sharded_state_dict(optimizer, shard_spec_of))
    checkpoint = _on_all_ranks(lambda: _plan(Path(path), local, scaler), group)
    wanted = {name for names in comm.all_gather_object([f.name for f in local], group) for name in names}
    surplus = [name for name in checkpoint.names() if name not in wanted]
    if surplus:
        raise CheckpointError(f"{path} has tensor {surplus[0]}, the model has not; it is a checkpoint of another model")
    staged = _on_all_ranks(lambda: [checkpoint.read(f.name, f.region) for f in local], group)
    checked = set().union(*comm.all_gather_object(checkpoint.checked, group))
    left = [shard for shard in checkpoint.shards() if shard not in checked]
    _on_all_ranks(lambda: checkpoint.verify(left[comm.get_rank(group) :: comm.get_world_size(group)]), group)
    for shard, values in zip(local, staged, strict=True):
        shard.view.copy_(values)
    return _restore(checkpoint, optimizer, scaler, comm.get_rank(group))


def _begin(folder: Path, step: int, values: dict[str, Any], local: list[SavedShard], lock: ExitStack | None) -> str:
    """Check what is to be saved; on rank 0 (with `lock`), lock the folder, make the hidden one and return its name."""
    try:
        json.dumps(values)
    except TypeError as error:
        raise CheckpointError(f"sampler and config must be such as JSON can hold: {error}") from error
    for shard in local:
        if not is_known(shard.view.dtype):
            raise CheckpointError(
                f"tensor {shard.name} is {type_name(shard.view.dtype)}, which safetensors cannot hold; convert "
                "it, or register a buffer that can be made anew with persistent=False"
            )
    if lock is None:
        return ""
    lock.enter_context(folders.locked(folder))
    return folders.begin(folder, step).name


def _claim(shard: SavedShard) -> Claim:
    """Describe a shard to the other ranks; buffers may differ between ranks, and the first one's are saved."""
    checksum = None if shard.name.startswith("buffer/") else sample_checksum(shard.view)
    return Claim(shard.name, shard.shape, type_name(shard.view.dtype), shard.region, checksum)


def _assign_writers(claims_by_rank: list[list[Claim]]) -> dict[str, TensorEntry]:
    """Assign every shard to one rank: of several ranks that hold the same elements, the first writes them.

    Raises:
        CheckpointError: what would be written could not be read, or is not what every rank holds.
    """
    tensors: dict[str, TensorEntry] = {}
    first: dict[tuple[str, ShardRegion], tuple[int, int | None]] = {}  # rank, checksum
    for rank, claims in enumerate(claims_by_rank):
        for name, shape, dtype, region, checksum in claims:
            entry = tensors.setdefault(name, TensorEntry(dtype, shape))
            if (entry.dtype, entry.shape) != (dtype, shape):
                raise CheckpointError(
                    f"tensor {name} is {dtype} {shape} on rank {rank} and {entry.dtype} {entry.shape} on another; "
                    f"{_REMEDY}"
                )
            if (name, region) not in first:
                first[name, region] = rank, checksum
                entry.shards.append(StoredShard(_file_of(rank), region))
            elif first[name, region][1] != checksum:
                raise CheckpointError(
                    f"tensor {name} has other values on rank {rank} than on rank {first[name, region][0]}; if they are "
                    f"copies, they must be equal; else {_REMEDY}"
                )
    for name, entry in tensors.items():
        _check_full(name, entry)
    return tensors


def _check_full(name: str, entry: TensorEntry) -> None:
    held, numel = sum(shard.region.numel for shard in entry.shards), prod(entry.shape)
    if held != numel:
        raise CheckpointError(
            f"the shards of tensor {name} have {held} elements, and the tensor has {numel}: some are missing or held "
            f"twice; save with all ranks of the model, and {_REMEDY}"
        )
    if len({shard.file for shard in entry.shards}) < len(entry.shards):
        raise CheckpointError(f"one rank has two shards of tensor {name}, and a file holds one; {_REMEDY}")


def _write(hidden: Path, rank: int, local: list[SavedShard], tensors: dict[str, TensorEntry], step: int) -> Written:
    if not hidden.is_dir():
        raise CheckpointError(
            f"{hidden.parent} is not shared: rank 0 made {hidden.name} in it, and rank {rank} does not see that; "
            "save into a folder that all ranks share"
        )
    file = hidden / _file_of(rank)
    mine = {f.name: f.view for f in local if StoredShard(file.name, f.region) in tensors[f.name].shards}
    parts = {name: (view.dtype, (view.numel(),)) for name, view in mine.items()}
    return write_tensors(file, parts, mine.__getitem__, metadata_of(step, file.name, folders.token_of(hidden)))


def _finish(
    hidden: Path,
    step: int,
    files: dict[str, Written],
    tensors: dict[str, TensorEntry],
    values: dict[str, Any],
    keep: int | None,
) -> None:
    """Complete the save on rank 0 when all files are on disk: from here on the checkpoint exists."""
    for name, entry in tensors.items():
        entry.shards[:] = [replace(shard, checksum=files[shard.file].checksums[name]) for shard in entry.shards]
    sizes = {file: written.size for file, written in files.items()}
    (hidden / INDEX).write_text(Index(step, sizes, tensors, values, folders.token_of(hidden)).dumps(), encoding="utf-8")
    folders.sync(hidden / INDEX)
    final = folders.commit(hidden)
    if keep is not None:
        folders.rotate(final.parent, step, keep)


def _plan(path: Path, local: list[SavedShard], scaler: LossScaler | None) -> Checkpoint:
    checkpoint = Checkpoint(path)
    for shard in local:
        checkpoint.check(shard.name, shard.region, shard.view.dtype)
    if scaler is not None and checkpoint.index.values["scaler"] is None:
        raise CheckpointError(f"{path} was saved without a loss scaler; leave out scaler=")
    return checkpoint


def _restore(checkpoint: Checkpoint, optimizer: ShardedOptimizer, scaler: LossScaler | None, rank: int) -> Restored:
    """Restore everything that is not a tensor."""
    for shard in optimizer.local_shards:
        shard.adam.round()
    optimizer.all_gather_weights()
    values = checkpoint.index.values
    optimizer.adam.num_steps = int(values["num_steps"])  # the bias corrections go on where they were
    if scaler is not None:
        scaler.load_state_dict(values["scaler"])
    if rank < len(values["random"]):
        set_random_state(values["random"][rank], optimizer.adam.generator)
    topology = Topology(**values["topology"]) if values["topology"] else None
    return Restored(checkpoint.step, values["sampler"], values["config"], topology, tuple(checkpoint.reads))


def _on_all_ranks(action: Callable[[], T], group: Group | None) -> T:
    """Run an action on every rank; if it fails on one, raise its error on all, so that no rank hangs."""
    problem, result = None, None
    try:
        result = action()
    except Exception as error:
        expected = isinstance(error, (OSError, CheckpointError))
        problem = str(error) if expected else f"{type(error).__name__}: {error}"
    problems = [found for found in comm.all_gather_object(problem, group) if found]
    if problems:
        raise CheckpointError(problems[0])
    return cast(T, result)


def _file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"
