"""`save` and `load`, which all ranks of a group call together; `write_checkpoint`, of full tensors, by one process.

Chapter: book/dp/io.  In: an optimizer on N ranks, a folder.  Out: a checkpoint; the state, on any number.
  save   rank 0 locks the folder -> ranks all-gather the list of their shards -> each element is assigned to one writer
         -> each rank writes a file and waits for the disk -> rank 0 writes the index and renames the folder
  load   each rank checks names, shapes and types -> reads into new memory -> compares checksums (a shard that no rank
         read completely is read once more, by one rank) -> if no rank has failed, all copy; otherwise none does
Elsewhere: torch.distributed.checkpoint (a pickled index); Megatron dist_checkpointing.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.dp.checkpoint import folder as folders
from dualpipe_lab.dp.checkpoint.file import Kinds, Values, Written, is_known, share_out, write_tensors
from dualpipe_lab.dp.checkpoint.reader import (
    INDEX,
    VALUES,
    Checkpoint,
    CheckpointError,
    Index,
    Read,
    StoredShard,
    TensorEntry,
    metadata_of,
    name_of,
    type_name,
)
from dualpipe_lab.dp.checkpoint.region import copies_between, full_region
from dualpipe_lab.dp.checkpoint.state import (
    SavedShard,
    ShardSpecOf,
    assign_writers,
    check_numbers,
    claim_of,
    file_of,
    group_names,
    group_values,
    matched_groups,
    merged_groups,
    random_state,
    set_group_values,
    set_random_state,
    sharded_state_dict,
)
from dualpipe_lab.dp.mixed_precision import LossScaler
from dualpipe_lab.dp.sharded import ShardedOptimizer
from dualpipe_lab.topology import Topology

T = TypeVar("T")
_NO_VALUES: dict[str, Any] = dict.fromkeys(VALUES) | {"random": [], "num_steps": 0}


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
    frozen: bool = True,
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
        frozen: whether weights that are not trained are saved; False saves the adapters of `models.add_lora` alone.
        keep: number of checkpoints to keep, this one included; older ones are removed.
        group: the ranks that save together (default: the world).

    Raises:
        CheckpointError: the step is saved already, another save is under way, or the folder is not shared; two ranks
            have other values of the same elements, or no rank has some of them.
        ValueError: `keep` is below 1.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"keep counts from 1, got {keep}; leave it out to keep all checkpoints")
    rank, place = comm.get_rank(group), Path(folder)
    values: dict[str, Any] = {"sampler": sampler, "config": config, "num_steps": optimizer.num_steps}
    values["scaler"] = scaler.state_dict() if scaler else None
    values["topology"] = topology.describe() if topology else None
    values["param_groups"], local, tensors = _checked(optimizer, shard_spec_of, frozen, group)
    with ExitStack() as lock:
        made = _on_all_ranks(lambda: _begin(place, step, values, lock if rank == 0 else None), group)
        begun = comm.all_gather_object(made, group)[0]
        hidden, token = place / begun, folders.token_of(begun)
        written = _on_all_ranks(lambda: _write(hidden, token, rank, local, tensors, step), group)
        files = {file_of(number): found for number, found in enumerate(comm.all_gather_object(written, group))}
        values["random"] = comm.all_gather_object(random_state(), group)
        index = _index_of(step, token, files, tensors, values)
        _on_all_ranks(lambda: _finish(hidden, index, keep) if rank == 0 else None, group)
    return place / name_of(step)


def check_save(optimizer: ShardedOptimizer) -> None:
    """Raise what `save` would raise because of the model and its optimizer; nothing is written.

    Call it on every rank before the first step, and once more after it, when statistics of other data differ.
    """
    _checked(optimizer, None, True, None)


def gathered_weights(optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    """Return the full weights by their names in the full model, on every rank, as a checkpoint has them."""
    held = [shard for shard in sharded_state_dict(optimizer) if shard.name.startswith("parameter/")]
    parts = [(shard.name.removeprefix("parameter/"), shard.shape, shard.region, shard.view.cpu()) for shard in held]
    full: dict[str, Tensor] = {}
    for name, shape, region, view in chain.from_iterable(comm.all_gather_object(parts)):
        flat = full.setdefault(name, torch.empty(shape, dtype=view.dtype, device="cpu")).view(-1)
        for source, target, length in copies_between(region, full_region(shape)):
            flat[target : target + length] = view[source : source + length]
    return full


def load(
    path: Path | str,
    optimizer: ShardedOptimizer,
    *,
    scaler: LossScaler | None = None,
    shard_spec_of: ShardSpecOf | None = None,
    frozen: bool = True,
    group: Group | None = None,
) -> Restored:
    """Load a checkpoint that any number of ranks saved with any stage of ZeRO.

    Weights, the optimizer's state, the values of its param groups (lr too, as torch's load_state_dict does, and found
    by the names of their parameters), the number of steps, the scaler and the state of random numbers are restored.  If
    loading fails on one rank, nothing has changed on any rank.

    Args:
        path: of the checkpoint: `latest(folder)`.
        optimizer: of the same model, with the same precision.
        scaler: a loss scaler, whose scale and count are restored.
        shard_spec_of: as in `save`.
        frozen: False loads what `save(frozen=False)` wrote; the weights that are not trained stay as they are.
        group: the ranks that load together (default: the world).

    Raises:
        CheckpointError: naming the file and the tensor that are damaged, missing or of another model.
    """
    states = [dict(shard.optimizer.state) for shard in optimizer.local_shards]
    try:
        checkpoint, local, staged, groups = _read(Path(path), optimizer, scaler, shard_spec_of, frozen, group)
    except BaseException:
        for held, state in zip(optimizer.local_shards, states, strict=True):
            held.optimizer.state = state
        raise
    for shard, values in zip(local, staged, strict=True):
        shard.fill(values)
    return _restore(checkpoint, optimizer, scaler, comm.get_rank(group), groups)


def _read(
    path: Path,
    optimizer: ShardedOptimizer,
    scaler: LossScaler | None,
    shard_spec_of: ShardSpecOf | None,
    frozen: bool,
    group: Group | None,
) -> tuple[Checkpoint, list[SavedShard], list[Tensor], list[dict[str, Any]] | None]:
    """Return a checkpoint, this rank's shards, their values, and those of its groups, once all ranks have read them."""
    checkpoint = _on_all_ranks(lambda: _open(path, optimizer, scaler), group)
    for shard in optimizer.local_shards:
        shard.optimizer.make_state(checkpoint.index.values["num_steps"] > 0)
    local = list(sharded_state_dict(optimizer, shard_spec_of, frozen))
    _on_all_ranks(lambda: _check(checkpoint, local), group)
    wanted = {name for names in comm.all_gather_object([f.name for f in local], group) for name in names}
    surplus = [name for name in checkpoint.names() if name not in wanted]
    if surplus:
        raise CheckpointError(
            f"{path} has tensor {surplus[0]}, the model has not; it is a checkpoint of another model or optimizer"
            + ("" if frozen else ", or of all weights: load it without frozen=False")
        )
    names = comm.all_gather_object(group_names(optimizer, shard_spec_of), group)
    groups = _on_all_ranks(lambda: _groups(checkpoint, optimizer, names), group)
    staged = _on_all_ranks(lambda: [checkpoint.read(f.name, f.region) for f in local], group)
    checked = set().union(*comm.all_gather_object(checkpoint.checked, group))
    left = [shard for shard in checkpoint.shards() if shard not in checked]
    _on_all_ranks(lambda: checkpoint.verify(left[comm.get_rank(group) :: comm.get_world_size(group)]), group)
    return checkpoint, local, staged, groups


def _checked(
    optimizer: ShardedOptimizer, shard_spec_of: ShardSpecOf | None, frozen: bool, group: Group | None
) -> tuple[list[dict[str, Any]], list[SavedShard], dict[str, TensorEntry]]:
    """Return the values of the param groups, this rank's shards, and which rank writes what, if all can be saved."""
    groups = _on_all_ranks(lambda: group_values(optimizer, shard_spec_of), group)
    merged = merged_groups(comm.all_gather_object(groups, group))
    local = _on_all_ranks(lambda: _storable(optimizer, shard_spec_of, frozen), group)
    return merged, local, assign_writers(comm.all_gather_object([claim_of(shard) for shard in local], group))


def _storable(optimizer: ShardedOptimizer, shard_spec_of: ShardSpecOf | None, frozen: bool) -> list[SavedShard]:
    local = list(sharded_state_dict(optimizer, shard_spec_of, frozen))
    for shard in local:
        if not is_known(shard.view.dtype):
            raise CheckpointError(
                f"tensor {shard.name} is {type_name(shard.view.dtype)}, which safetensors cannot hold; convert "
                "it, or register a buffer that can be made anew with persistent=False"
            )
    return local


def _begin(folder: Path, step: int, values: dict[str, Any], lock: ExitStack | None) -> str:
    """Check the values; on rank 0 (with `lock`), lock the folder, make the hidden one and return its name."""
    try:
        json.dumps(values)
    except TypeError as error:
        raise CheckpointError(f"sampler and config must be such as JSON can hold: {error}") from error
    if lock is None:
        return ""
    lock.enter_context(folders.locked(folder))
    return folders.begin(folder, step)


def _write(
    hidden: Path, token: str, rank: int, local: list[SavedShard], tensors: dict[str, TensorEntry], step: int
) -> Written:
    if not hidden.is_dir():
        raise CheckpointError(
            f"{hidden.parent} is not shared: rank 0 made {hidden.name} in it, and rank {rank} does not see that; "
            "save into a folder that all ranks share"
        )
    file = hidden / file_of(rank)
    mine = {f.name: f.view for f in local if StoredShard(file.name, f.region) in tensors[f.name].shards}
    parts = {name: (view.dtype, (view.numel(),)) for name, view in mine.items()}
    return write_tensors(file, parts, mine.__getitem__, metadata_of(step, file.name, token))


def _index_of(
    step: int, token: str, files: dict[str, Written], tensors: dict[str, TensorEntry], values: dict[str, Any]
) -> Index:
    """Return what a checkpoint says about its files."""
    for name, entry in tensors.items():
        entry.shards[:] = [replace(shard, checksum=files[shard.file].checksums[name]) for shard in entry.shards]
    return Index(step, {file: written.size for file, written in files.items()}, tensors, values, token)


def _finish(hidden: Path, index: Index, keep: int | None) -> None:
    """Complete the save on rank 0 when the files of all ranks are there: from here on the checkpoint exists."""
    (hidden / INDEX).write_text(index.dumps(), encoding="utf-8")
    folders.sync(hidden / INDEX)
    final = folders.commit(hidden)
    if keep is not None:
        folders.rotate(final.parent, index.step, keep)


def _open(path: Path, optimizer: ShardedOptimizer, scaler: LossScaler | None) -> Checkpoint:
    optimizer.check_module()
    checkpoint = Checkpoint(path)
    if scaler is not None and checkpoint.index.values["scaler"] is None:
        raise CheckpointError(f"{path} was saved without a loss scaler; leave out scaler=")
    return checkpoint


def _check(checkpoint: Checkpoint, local: list[SavedShard]) -> None:
    for shard in local:
        checkpoint.check(shard.name, shard.region, shard.view.dtype)


def _groups(
    checkpoint: Checkpoint, optimizer: ShardedOptimizer, names: list[list[list[str]]]
) -> list[dict[str, Any]] | None:
    groups = matched_groups(checkpoint.path, checkpoint.index.values["param_groups"], names)
    check_numbers(optimizer, groups)
    return groups


def _restore(
    checkpoint: Checkpoint,
    optimizer: ShardedOptimizer,
    scaler: LossScaler | None,
    rank: int,
    groups: list[dict[str, Any]] | None,
) -> Restored:
    """Restore everything that is not a tensor."""
    values = checkpoint.index.values
    optimizer.updater.num_steps = int(values["num_steps"])
    set_group_values(optimizer, groups)
    for shard in optimizer.local_shards:
        shard.optimizer.round()
    optimizer.all_gather_weights()
    if scaler is not None:
        scaler.load_state_dict(values["scaler"])
    if rank < len(values["random"]):
        set_random_state(values["random"][rank])
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


def write_checkpoint(
    folder: Path,
    step: int,
    kinds: Kinds,
    read: Callable[[str], Values],
    values: Mapping[str, Any],
    max_bytes: int = 5 * 10**9,
) -> Path:
    """Write a checkpoint of full tensors, in one process, and return its path; a failed one leaves nothing.

    Args:
        folder: the folder of checkpoints to write into.
        step: of the training.
        kinds: type and shape of every tensor, by its name in the checkpoint.
        read: returns a tensor by that name, or its parts along the first axis, one after the other.
        values: everything that is not a tensor.
        max_bytes: of a file; a larger tensor has a file of its own.

    Raises:
        CheckpointError: the step is saved already, or another save is under way.
    """
    existed = folder.exists()

    def remove_folder() -> None:
        if not existed and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()

    with ExitStack() as undo:
        undo.callback(remove_folder)  # when the lock's file is gone
        undo.enter_context(folders.locked(folder))
        hidden = folder / folders.begin(folder, step)
        undo.callback(shutil.rmtree, hidden, ignore_errors=True)  # if it has not become the checkpoint
        files: dict[str, Written] = {}
        tensors: dict[str, TensorEntry] = {}
        token = folders.token_of(hidden.name)
        for number, names in enumerate(share_out(kinds, max_bytes)):
            file = file_of(number)
            parts = {name: (kinds[name][0], (prod(kinds[name][1]),)) for name in names}
            files[file] = write_tensors(hidden / file, parts, read, metadata_of(step, file, token))
            for name in names:
                dtype, shape = kinds[name]
                tensors[name] = TensorEntry(type_name(dtype), shape, [StoredShard(file, full_region(shape))])
        _finish(hidden, _index_of(step, token, files, tensors, {**_NO_VALUES, **values}), None)
    return folder / name_of(step)
