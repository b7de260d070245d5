"""Exercises of "Saves that survive a crash": failures that show a flaw, a pointer.

Chapter: book/dp/crash-safety.  Operations run on a disk that forgets what was not synced.
  lost "data PATH"     the file has what it had at its last sync
  lost "names PATH"    the folder has the names that it had at its last sync
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from typing import Any

from dualpipe_course.declared import Puzzle, Repair
from dualpipe_course.dp.disk import Disk, File, Folder, PowerFailure
from dualpipe_course.plain import plain
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

WHOLE = {step: {"a": f"a of step {step}".encode(), "b": f"b of step {step}".encode()} for step in (1, 2)}
_PARTS = ("write run/.new/a", "write run/.new/b", "sync run/.new/a", "sync run/.new/b")
LOGS = {
    "north": ("mkdir run/.new", *_PARTS[:3], "sync run/.new", "rename run/.new run/step-2", "sync run"),
    "east": ("mkdir run/.new", *_PARTS, "rename run/.new run/step-2", "sync run/step-2", "sync run"),
    "south": ("mkdir run/.new", "sync run", *_PARTS, "sync run/.new", "rename run/.new run/step-2"),
    "west": ("mkdir run/.new", *_PARTS, "sync run/.new", "rename run/.new run/step-2", "sync run"),
}


def _first_disk(latest: bool = False) -> Disk:
    """A disk with step 1, for good; with the file `latest` or without."""
    disk = Disk()
    disk.mkdir("run/step-1")
    for name, data in WHOLE[1].items():
        disk.write(f"run/step-1/{name}", data)
        disk.sync(f"run/step-1/{name}")
    if latest:
        disk.write("run/latest", b"step-1")
        disk.sync("run/latest")
    disk.sync("run/step-1")
    disk.sync("run")
    disk.log = []
    return disk


def _run_operations(disk: Disk, operations: Sequence[str]) -> None:
    """Do what a log says, such as `write run/step-2/a`; a file gets the bytes of step 2."""
    for operation in operations:
        kind, *paths = operation.split()
        if kind == "write":
            disk.write(paths[0], WHOLE[2][paths[0][-1]])
        else:
            getattr(disk, kind)(*paths)


def _pending(disk: Disk) -> list[str]:
    """What may be lost: data of files and names in folders that are not as they were at their last sync."""
    return [what for what, node in _walk(disk.root.names["run"], "run") if _differs(node)]


def _lose(disk: Disk, lost: Sequence[str]) -> Disk:
    """The disk that is found after these are lost and everything else has survived."""
    found = Disk()
    found.root.names["run"] = _without(disk.root.names["run"], "run", set(lost))
    return found


def _reader_finds(disk: Disk, has_returned: bool) -> str:
    """What is wrong with a disk, in words; an empty string if a reader is well served."""
    steps = sorted(name for name in disk.listing("run") if name.startswith("step-"))
    if not steps:
        return "no checkpoint is left"
    newest = disk.listing(f"run/{steps[-1]}")
    if newest != WHOLE[int(steps[-1][-1])]:
        return f"{steps[-1]} is there and not whole"
    return "save had returned, and step-2 is gone" if has_returned and steps[-1] != "step-2" else ""


def _differs(node: File | Folder) -> bool:
    return node.data != node.kept if isinstance(node, File) else node.names != node.kept


def _walk(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, File):
        yield f"data {path}", node
        return
    yield f"names {path}", node
    for name, child in node.names.items():
        yield from _walk(child, f"{path}/{name}")


def _without(node: Any, path: str, lost: set[str]) -> Any:
    if isinstance(node, File):
        return File(*[node.kept if f"data {path}" in lost else node.data] * 2)
    found = Folder()
    for name, child in (node.kept if f"names {path}" in lost else node.names).items():
        now = next((other for other, same in node.names.items() if same is child), name)  # as the process names it
        found.names[name] = _without(child, f"{path}/{now}", lost)
    return found


def _parse(name: str, answer: Any, log: Sequence[str]) -> tuple[int, list[str]]:
    if not isinstance(answer, list) or len(answer) != 2 or not isinstance(answer[1], list):
        raise Wrong(f"{name}: a failure is (number of operations that are done, [what is lost]), or None")
    done, lost = answer
    if type(done) is not int or not 0 <= done <= len(log):
        raise Wrong(f"{name}: the number of operations that are done is 0 to {len(log)}")
    disk = _first_disk()
    _run_operations(disk, log[:done])
    may = _pending(disk)
    for what in lost:
        if type(what) is not str or what not in may:
            can = ", ".join(may) or "nothing"
            raise Wrong(f"{name}: after {done} operations {what!r} cannot be lost; what can: {can}")
    return done, lost


def _verdict(log: Sequence[str], done: int, lost: Sequence[str]) -> str:
    disk = _first_disk()
    _run_operations(disk, log[:done])
    return _reader_finds(_lose(disk, lost), has_returned=done == len(log))


def _flaws(log: Sequence[str]) -> list[tuple[int, tuple[str, ...]]]:
    """Every failure that does harm.

    >>> _flaws(LOGS["west"])
    []
    """
    found = []
    for done in range(len(log) + 1):
        disk = _first_disk()
        _run_operations(disk, log[:done])
        may = _pending(disk)
        for lost in chain.from_iterable(combinations(may, count) for count in range(len(may) + 1)):
            if _verdict(log, done, lost):
                found.append((done, lost))
    return found


def _judge_fail(answer: object) -> str:
    if not isinstance(answer, Mapping) or set(answer) != set(LOGS):
        raise Wrong(f"this check takes a dict with the keys {', '.join(LOGS)}")
    chosen = {name: plain(answer[name]) for name in LOGS}
    for name, log in LOGS.items():
        if chosen[name] is ...:
            raise Wrong(f"{name}: not answered yet: put a failure, or None for an order without a flaw")
        if chosen[name] is None:
            if _flaws(log):
                raise Wrong(f"{name}: this order has a flaw: some failure leaves half a checkpoint, or loses one")
            continue
        done, lost = _parse(name, chosen[name], log)
        if not _verdict(log, done, lost):
            also = "" if _flaws(log) else "; try to prove that there is no flaw"
            raise Wrong(
                f"{name}: after {done} operations, with {lost or 'nothing'} lost, a reader is well served{also}"
            )
    return "three orders are flawed, each at a moment of its own, and one is sound"


def _save_and_fail(rank: int, world_size: int, fn: Callable[..., Any]) -> str:
    disk = _first_disk(latest=True)
    fn(disk, 2, dict(WHOLE[2]))
    log = disk.log[:]
    problem = _pointed_damage(disk, "after save has returned", must_be_new=True)
    if not problem and disk.exists("run/step-1"):
        problem = "save has returned, and step-1 is still there; remove it when nothing needs it any more"
    for lives in range(0 if problem else len(log)):
        disk = _first_disk(latest=True)
        disk.lives = lives
        when = f"before operation {lives + 1} ({log[lives]})"
        try:
            fn(disk, 2, dict(WHOLE[2]))
        except PowerFailure:
            problem = _pointed_damage(disk, when, must_be_new=False) or _again(fn, disk, when)
        if problem:
            break
    return f"{problem}\n  your operations: {', '.join(log)}" if problem else ""


def _pointed_damage(disk: Disk, when: str, must_be_new: bool) -> str:
    lost = f"the power fails {when}: "
    for found in disk.after_failure():
        held = found.listing("run")
        latest = held.get("latest")
        if latest not in (b"step-1", b"step-2"):
            said = "is gone" if latest is None else f"may hold {latest.decode()!r}"
            return f"{lost}the file latest {said}; write another file, sync it, and let it replace this one"
        if must_be_new and latest != b"step-2":
            return f"{lost}latest may still name step-1; its name is kept when run is synced"
        name = latest.decode()
        if name not in held:
            why = "sync run before latest names it" if name == "step-2" else "remove it when latest is kept on the disk"
            return f"{lost}latest names {name}, and {name} is not there; {why}"
        if (files := found.listing(f"run/{name}")) != WHOLE[int(name[-1])]:
            part = next(part for part in ("a", "b") if files.get(part) != WHOLE[int(name[-1])][part])
            why = "sync the folder for its names" if part not in files else "sync every file for its bytes"
            return f"{lost}latest names {name}, and {part} of {name} may not be whole; {why} before that"
    return ""


def _again(fn: Callable[..., Any], disk: Disk, when: str) -> str:
    for found in disk.after_failure():
        if found.listing("run")["latest"] == b"step-2":
            continue
        try:
            fn(found, 2, dict(WHOLE[2]))
        except OSError as error:
            return (
                f"the power fails {when}, the run starts again, and its save stops with {type(error).__name__}: {error}"
            )
        if problem := _pointed_damage(found, "after the save of a run that started again", must_be_new=True):
            return problem
    return ""


def _judge_pointed(fn: Callable[..., Any]) -> str:
    if problem := on_ranks(_save_and_fail, 1, fn, case="saving")[0]:
        raise Wrong(problem)
    return "latest names a whole checkpoint, with the power failing before each operation and after the last"


fail = Puzzle(
    "crash_safety-1",
    "Let the power fail",
    "Choose moments and losses that show which of four orders of operations are flawed.",
    judge=_judge_fail,
    minutes=15,
    points=3,
    hints=(
        "Go through each log with the page's five steps beside it. Which step is missing, or comes too late?",
        "After the rename a reader finds step-2. What of it may not be on the disk at that moment?",
        "A flaw may also show at the very end: save has returned, and something is lost all the same.",
    ),
)

pointed = Repair(
    "crash_safety-2",
    "A pointer to the latest",
    "Repair `save(disk, step, parts)`, behind which a file `latest` names the checkpoint to load.",
    judge=_judge_pointed,
    minutes=20,
    points=3,
    hints=(
        "A file that is written in place may hold a half of the new bytes. How does a folder get its name in one step?",
        "latest must not name a folder that may still vanish: which sync keeps the name of step-2, which its files'?",
        "Only when the new latest is on the disk is step-1 not needed any more.",
    ),
)
