"""`save` and `load`: called by all ranks together.

Chapter: book/dp/io.  In: an optimizer on N ranks, a folder.  Out: a checkpoint; the state, on any number.
  save   rank 0 locks the folder -> tell each other what everyone holds -> each element has one owner -> everyone writes
         a file and waits for the disk -> rank 0 writes the index and renames the folder
  load   everyone plans and checks -> reads into new memory -> compares checksums (a piece that nobody read whole is
         read once more, by one rank) -> if all ranks are content, all copy; otherwise none does
Elsewhere: torch.distributed.checkpoint (a pickled index); Megatron dist_checkpointing.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.dp.checkpoint import folder as folders
from dualpipe_lab.dp.checkpoint.file import Written, is_known, write_tensors
from dualpipe_lab.dp.checkpoint.index import INDEX, CheckpointError, Index, Stored, TensorEntry
from dualpipe_lab.dp.checkpoint.reader import Checkpoint, Read, metadata_of, type_name
from dualpipe_lab.dp.checkpoint.region import Region
from dualpipe_lab.dp.checkpoint.state import Fragment, PlaceOf, fragments, random_state, set_random_state
from dualpipe_lab.dp.mixed_precision import LossScaler
from dualpipe_lab.dp.sharded import ShardedOptimizer
from dualpipe_lab.topology import Topology

T = TypeVar("T")


@dataclass(frozen=True)
class Restored:
    """What a checkpoint holds besides tensors.

    Attributes:
        step: of the training.
        sampler: the position in the data, as it was passed to `save`.
        config: as it was passed to `save`.
        topology: the ranks that saved.
        reads: which bytes of which file this rank read.
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
    place_of: PlaceOf | None = None,
    keep: int | None = None,
    group: Group | None = None,
) -> Path:
    """Save the state of all ranks as one checkpoint, `folder/step-...`; return its path.

    Args:
        folder: on a disk that all ranks share.
        step: of the training.
        optimizer: with its module.
        scaler: its scale and count are saved.
        sampler: the position in the data; like `config`, anything that JSON can hold.
        config: of the training.
        topology: of the ranks.
        place_of: where a parameter lies in the whole model, by its name and value; needed under tp and pp.
        keep: remove all older checkpoints but so many, this one included.
        group: the ranks that save together (default: the world).

    Raises:
        CheckpointError: the step is saved already, another save is under way, or the folder is not shared.
        ValueError: `keep` is below 1.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"keep counts from 1, got {keep}; leave it out to keep all checkpoints")
    rank, folder = comm.get_rank(group), Path(folder)
    values: dict[str, Any] = {"sampler": sampler, "config": config, "num_steps": optimizer.num_steps}
    values["scaler"] = scaler.state() if scaler else None
    values["topology"] = topology.describe() if topology else None
    own = list(fragments(optimizer, place_of))
    with ExitStack() as held:
        made = _agreed(lambda: _begin(folder, step, values, own, held if rank == 0 else None), group)
        hidden = folder / comm.all_gather_object(made, group)[0]
        tensors = _deal(
            comm.all_gather_object([(f.name, f.shape, type_name(f.view.dtype), f.region) for f in own], group)
        )
        written = _agreed(lambda: _write(hidden, rank, own, tensors, step), group)
        files = {_file_of(number): found for number, found in enumerate(comm.all_gather_object(written, group))}
        values["random"] = comm.all_gather_object(random_state(optimizer.generator), group)
        _agreed(lambda: _finish(hidden, step, files, tensors, values, keep) if rank == 0 else None, group)
    return folder / folders.name_of(step)


def load(
    path: Path | str,
    optimizer: ShardedOptimizer,
    *,
    scaler: LossScaler | None = None,
    place_of: PlaceOf | None = None,
    group: Group | None = None,
) -> Restored:
    """Load a checkpoint, whatever the number of ranks that saved it, and whichever stage of ZeRO.

    Weights, moments and the number of steps become those of the checkpoint; so do the scaler and, on ranks that had
    one, the random numbers.  If it does not fit on one rank, no rank has changed.

    Args:
        path: of the checkpoint: `latest(folder)`.
        optimizer: of the same model, with the same precision.
        scaler: takes the saved scale and count.
        place_of: as in `save`.
        group: the ranks that load together (default: the world).

    Raises:
        CheckpointError: naming the file and the tensor that are damaged, missing or of another model.
    """
    own = list(fragments(optimizer, place_of))
    checkpoint = _agreed(lambda: _plan(Path(path), own, scaler), group)
    wanted = {name for names in comm.all_gather_object([f.name for f in own], group) for name in names}
    surplus = [name for name in checkpoint.names() if name not in wanted]
    if surplus:
        raise CheckpointError(f"{path} has tensor {surplus[0]}, the model has not; it is a checkpoint of another model")
    staged = _agreed(lambda: [checkpoint.read(f.name, f.region) for f in own], group)
    checked = set().union(*comm.all_gather_object(checkpoint.checked, group))
    left = [piece for piece in checkpoint.pieces() if piece not in checked]
    _agreed(lambda: checkpoint.verify(left[comm.get_rank(group) :: comm.get_world_size(group)]), group)
    for fragment, values in zip(own, staged, strict=True):
        fragment.view.copy_(values)
    return _restore(checkpoint, optimizer, scaler, comm.get_rank(group))


def _begin(folder: Path, step: int, values: dict[str, Any], own: list[Fragment], held: ExitStack | None) -> str:
    """Check what is to be saved; with `held`, on rank 0, lock the folder, make the hidden one and return its name."""
    try:
        json.dumps(values)
    except TypeError as error:
        raise CheckpointError(f"sampler and config must be such as JSON can hold: {error}") from error
    for fragment in own:
        if not is_known(fragment.view.dtype):
            raise CheckpointError(
                f"tensor {fragment.name} is {type_name(fragment.view.dtype)}, which safetensors cannot hold; convert "
                "it, or register a buffer that can be made anew with persistent=False"
            )
    if held is None:
        return ""
    held.enter_context(folders.locked(folder))
    return folders.begin(folder, step).name


def _deal(holdings: list[list[tuple[str, tuple[int, ...], str, Region]]]) -> dict[str, TensorEntry]:
    """Who writes what: elements that several ranks hold are left to the first of them."""
    tensors: dict[str, TensorEntry] = {}
    for rank, fragments_of_rank in enumerate(holdings):
        for name, shape, dtype, region in fragments_of_rank:
            entry = tensors.setdefault(name, TensorEntry(dtype, shape))
            if (entry.dtype, entry.shape) != (dtype, shape):
                raise CheckpointError(
                    f"tensor {name} is {dtype} {shape} on rank {rank} and {entry.dtype} {entry.shape} on another; "
                    "give each its own name with place_of"
                )
            if all(piece.region != region for piece in entry.pieces):
                entry.pieces.append(Stored(_file_of(rank), region))
    return tensors


def _write(hidden: Path, rank: int, own: list[Fragment], tensors: dict[str, TensorEntry], step: int) -> Written:
    if not hidden.is_dir():
        raise CheckpointError(
            f"{hidden.parent} is not shared: rank 0 made {hidden.name} in it, and rank {rank} does not see that; "
            "save into a folder that all ranks share"
        )
    file = hidden / _file_of(rank)
    mine = {f.name: f.view for f in own if Stored(file.name, f.region) in tensors[f.name].pieces}
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
    """What rank 0 does when all files are on the disk: from here on the checkpoint is there."""
    for name, entry in tensors.items():
        entry.pieces[:] = [replace(piece, checksum=files[piece.file].checksums[name]) for piece in entry.pieces]
    sizes = {file: written.size for file, written in files.items()}
    (hidden / INDEX).write_text(Index(step, sizes, tensors, values, folders.token_of(hidden)).dumps(), encoding="utf-8")
    folders.sync(hidden / INDEX)
    final = folders.commit(hidden)
    if keep is not None:
        folders.rotate(final.parent, step, keep)


def _plan(path: Path, own: list[Fragment], scaler: LossScaler | None) -> Checkpoint:
    checkpoint = Checkpoint(path)
    for fragment in own:
        checkpoint.check(fragment.name, fragment.region, fragment.view.dtype)
    if scaler is not None and checkpoint.index.values["scaler"] is None:
        raise CheckpointError(f"{path} was saved without a loss scaler; leave out scaler=")
    return checkpoint


def _restore(checkpoint: Checkpoint, optimizer: ShardedOptimizer, scaler: LossScaler | None, rank: int) -> Restored:
    """Everything but the tensors themselves."""
    for held in optimizer.held:
        held.adam.round()
    optimizer.publish()
    values = checkpoint.index.values
    optimizer.num_steps = int(values["num_steps"])  # the bias corrections go on where they were
    if scaler is not None:
        scaler.load(values["scaler"])
    if rank < len(values["random"]):
        set_random_state(values["random"][rank], optimizer.generator)
    topology = Topology(**values["topology"]) if values["topology"] else None
    return Restored(checkpoint.step, values["sampler"], values["config"], topology, tuple(checkpoint.reads))


def _agreed(action: Callable[[], T], group: Group | None) -> T:
    """Do something on every rank; if it fails on one, it fails on all, and nobody waits for the others in vain."""
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
