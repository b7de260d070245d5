"""Judging saves and loads: what is read, what survives a power failure at every moment, what a resume forgets.

Chapter: book/dp/io.  In: a learner's function.  Out: nothing, or a `Wrong` with the smallest case.
"""

from collections.abc import Callable
from typing import Any

from dualpipe_course.dp.disk import Disk, PowerFailure
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

# rows, columns, files, ranks
SIZES = (
    (1, 1, 1, 1), (4, 6, 2, 3), (4, 6, 2, 1), (5, 7, 2, 3), (5, 7, 3, 1), (7, 5, 4, 2), (3, 4, 4, 3), (2, 3, 1, 8),
    (6, 1, 4, 1), (20, 9, 7, 5),
)  # fmt: skip
OLD, NEW = {"a": b"old a", "b": b"old b"}, {"a": b"new part a", "b": b"new part b", "index": b"a, b"}


def check_reads(fn: Callable[..., Any]) -> None:
    """Raise `Wrong` unless every rank of any number reads its columns from files of rows, once each, in few reads."""
    problem = on_ranks(_read_all, 1, fn, case="reading")[0]
    if problem:
        raise Wrong(problem)


def check_save(fn: Callable[..., Any]) -> None:
    """Raise `Wrong` unless the disk holds the old checkpoint or the new one after a power failure at any moment."""
    problem = on_ranks(_save_and_fail, 1, fn, case="saving")[0]
    if problem:
        raise Wrong(problem)


def _read_all(rank: int, world_size: int, fn: Callable[..., Any]) -> str:
    for rows, columns, num_files, num_ranks in SIZES:
        for index in range(num_ranks):
            problem = _read_one(fn, rows, columns, num_files, num_ranks, index)
            if problem:
                return f"{rows} x {columns}, {num_files} file(s), rank {index} of {num_ranks}: {problem}"
    return ""


def _read_one(fn: Callable[..., Any], rows: int, columns: int, num_files: int, num_ranks: int, rank: int) -> str:
    import torch

    whole, size, reads = torch.arange(float(rows * columns)).view(rows, columns) + 1, -(-rows // num_files), []

    def read(file: int, first: int, last: int) -> torch.Tensor:
        held = whole[file * size : (file + 1) * size].flatten()
        if not (0 <= file < num_files and 0 <= first < last <= len(held)):
            raise ValueError(f"read({file}, {first}, {last}): file {file} of {num_files} has {len(held)} element(s)")
        reads.append((file, last - first))
        return held[first:last].clone()

    share = -(-columns // num_ranks)
    expected = whole[:, rank * share : (rank + 1) * share]
    try:
        found = fn(read, rows, columns, num_files, num_ranks, rank)
    except ValueError as error:
        return f"{error}; read only what a file has, counted from the file's own beginning"
    if getattr(found, "dtype", None) != torch.float32 or found.shape != expected.shape:
        shape = f" {list(found.shape)}" if isinstance(found, torch.Tensor) else ""
        return f"expected an fp32 tensor {list(expected.shape)}, got {type(found).__name__}{shape}"
    if found.tolist() != expected.tolist():
        ours, theirs = (_brief(tensor.flatten().tolist()) for tensor in (found, expected))
        return f"got {ours}, expected {theirs}, row by row (the matrix holds 1, 2, 3 and so on)"
    total = sum(count for _, count in reads)
    if total != expected.numel():
        return f"read {total} elements to get {expected.numel()}; a rank reads its own and no others"
    pieces = -(-rows // size) if expected.shape[1] == columns else rows
    if len(reads) > pieces and total:
        return f"{len(reads)} reads; {pieces} are enough, because what lies together in a file takes one read"
    return ""


def _brief(values: list[float]) -> str:
    words = [f"{value:g}" for value in values]
    return "[" + ", ".join(words if len(words) < 8 else [*words[:3], "...", *words[-2:]]) + "]"


def _save_and_fail(rank: int, world_size: int, fn: Callable[..., Any]) -> str:
    disk = _disk(None)
    fn(disk, "step-2", dict(NEW))
    problem = _damage(disk, must_have_new=True, when="after save has returned")
    log = disk.log[:]
    for lives in range(len(log) if not problem else 0):
        disk = _disk(lives)
        try:
            fn(disk, "step-2", dict(NEW))
        except PowerFailure:
            when = f"before operation {lives + 1} ({log[lives]})"
            problem = _damage(disk, must_have_new=False, when=when) or _again(fn, disk, when)
        if problem:
            break
    return f"{problem}\n  your operations: {', '.join(log)}" if problem else ""


def _disk(lives: int | None) -> Disk:
    """With a checkpoint that is on the disk for good."""
    disk = Disk()
    disk.mkdir("run/step-1")
    for name, data in OLD.items():
        disk.write(f"run/step-1/{name}", data)
        disk.sync(f"run/step-1/{name}")
    disk.sync("run/step-1")
    disk.sync("run")
    disk.log, disk.lives = [], lives
    return disk


def _damage(disk: Disk, must_have_new: bool, when: str) -> str:
    """What is wrong with one of the disks that a power failure may leave; an empty string if nothing is."""
    lost = f"the power fails {when}: "
    for found in disk.after_failure():
        steps = {name: found.listing(f"run/{name}") for name in found.listing("run") if name.startswith("step-")}
        if steps.get("step-1") != OLD:
            return f"{lost}step-1, the checkpoint before, is no longer whole; leave it alone"
        if other := next((name for name in steps if name not in ("step-1", "step-2")), None):
            return (
                f"{lost}a folder {other} is there and no checkpoint, and a search for step-... takes it for one; "
                "give it a name that begins otherwise until it is whole"
            )
        if "step-2" not in steps:
            if must_have_new:
                return f"{lost}step-2 may be gone; its name is kept when the folder that holds the name is synced"
            continue
        missing = sorted(set(NEW) - set(steps["step-2"]))
        if missing:
            return (
                f"{lost}step-2 is there, but {missing[0]} may not be in it; the folder gets its name last, when its "
                "own names are synced"
            )
        for name, data in NEW.items():
            if (there := steps["step-2"][name]) != data:
                size = len(there or b"")
                return (
                    f"{lost}step-2 is there, but {name} may have {size} of {len(data)} bytes; sync every file before "
                    "the folder gets its name"
                )
    return ""


def _again(fn: Callable[..., Any], disk: Disk, when: str) -> str:
    """A run that starts again saves the same step, whatever the failure left."""
    for found in disk.after_failure():
        if found.exists("run/step-2"):
            continue
        try:
            fn(found, "step-2", dict(NEW))
        except OSError as error:
            return (
                f"the power fails {when}, the run starts again, and its save stops with {type(error).__name__}: "
                f"{error}; remove what a broken-off save left"
            )
        problem = _damage(found, must_have_new=True, when="after the save of a run that started again")
        if not problem and set(found.listing("run/step-2")) != set(NEW):
            problem = "after a save that started again, step-2 holds leftovers of the first"
        if problem:
            return problem
    return ""
