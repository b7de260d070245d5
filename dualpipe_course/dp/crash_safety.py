"""Exercises of "Saves that survive a crash": failures that show a flaw, a pointer, the newest whole checkpoint.

Chapter: book/dp/crash-safety.  Operations run on a disk that forgets what was not synced.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, combinations
from typing import Any, TypeAlias
from zlib import crc32

from dualpipe_course.declared import Implement, Puzzle, Repair
from dualpipe_course.dp import failures
from dualpipe_course.plain import plain
from dualpipe_course.trial import call_each, ended
from dualpipe_course.wrong import Wrong

_PARTS = ("write run/.new/a", "write run/.new/b", "sync run/.new/a", "sync run/.new/b")
LOGS = {
    "north": ("mkdir run/.new", *_PARTS[:3], "sync run/.new", "rename run/.new run/step-2", "sync run"),
    "east": ("mkdir run/.new", *_PARTS, "rename run/.new run/step-2", "sync run/step-2", "sync run"),
    "south": ("mkdir run/.new", "sync run", *_PARTS, "sync run/.new", "rename run/.new run/step-2"),
    "west": ("mkdir run/.new", *_PARTS, "sync run/.new", "rename run/.new run/step-2", "sync run"),
}
Folders: TypeAlias = dict[str, dict[str, bytes]]


def _parse(name: str, answer: Any, log: Sequence[str]) -> tuple[int, list[str]]:
    if not isinstance(answer, list) or len(answer) != 2 or not isinstance(answer[1], list):
        raise Wrong(f"{name}: a failure is (number of operations that are done, [what is lost]), or None")
    done, lost = answer
    if type(done) is not int or not 0 <= done <= len(log):
        raise Wrong(f"{name}: the number of operations that are done is 0 to {len(log)}")
    disk = failures.first_disk()
    failures.run_operations(disk, log[:done])
    may = failures.pending(disk)
    for what in lost:
        if type(what) is not str or what not in may:
            can = ", ".join(may) or "nothing"
            raise Wrong(f"{name}: after {done} operations {what!r} cannot be lost; what can: {can}")
    return done, lost


def _verdict(log: Sequence[str], done: int, lost: Sequence[str]) -> str:
    disk = failures.first_disk()
    failures.run_operations(disk, log[:done])
    return failures.verdict(failures.lose(disk, lost), has_returned=done == len(log))


def _flaws(log: Sequence[str]) -> list[tuple[int, tuple[str, ...]]]:
    """Every failure that does harm.

    >>> _flaws(LOGS["west"])
    []
    """
    found = []
    for done in range(len(log) + 1):
        disk = failures.first_disk()
        failures.run_operations(disk, log[:done])
        may = failures.pending(disk)
        for lost in chain.from_iterable(combinations(may, count) for count in range(len(may) + 1)):
            if _verdict(log, done, lost):
                found.append((done, lost))
    return found


def _folder(step: int, **changes: bytes | None) -> dict[str, bytes]:
    """A whole checkpoint, with files changed, added or (None) removed."""
    files = {"a": f"weights of step {step}".encode(), "b": f"moments of step {step}".encode()}
    index = {"step": step, "files": {name: crc32(data) for name, data in files.items()}}
    held = {**files, "index": json.dumps(index).encode(), **changes}
    return {name: data for name, data in held.items() if data is not None}


def _cases() -> list[tuple[str, Folders, int | None]]:
    """Folders in words, their files, and the step to load."""
    one, two = _folder(1), _folder(2)
    half = two["index"][: len(two["index"]) // 2]
    return [
        ("no folder", {}, None),
        ("steps 1 and 2, whole", {"step-1": one, "step-2": two}, 2),
        ("steps 9 and 10, whole", {"step-9": _folder(9), "step-10": _folder(10)}, 10),
        ("step 2 hidden", {"step-1": one, ".saving-step-2": two}, 1),
        ("step 2 without its index", {"step-1": one, "step-2": _folder(2, index=None)}, 1),
        ("step 2 with half an index", {"step-1": one, "step-2": _folder(2, index=half)}, 1),
        ("step 2 with an empty index", {"step-1": one, "step-2": _folder(2, index=b"")}, 1),
        ("step 2 without file b", {"step-1": one, "step-2": _folder(2, b=None)}, 1),
        ("step 2 with half of file a", {"step-1": one, "step-2": _folder(2, a=two["a"][:8])}, 1),
        ("step 2 with file a of step 1", {"step-1": one, "step-2": _folder(2, a=one["a"])}, 1),
        ("all files of step 1 in step-2", {"step-1": one, "step-2": dict(one)}, 1),
        ("step 2 with a leftover beside its files", {"step-1": one, "step-2": _folder(2, rest=b"x")}, 2),
        ("step 2 with an index that is no dict", {"step-1": one, "step-2": _folder(2, index=b"3")}, 1),
        ("step 2 with an index without files", {"step-1": one, "step-2": _folder(2, index=b'{"step": 2}')}, 1),
        ("both steps damaged", {"step-1": _folder(1, b=b""), "step-2": _folder(2, a=b"")}, None),
        ("another folder", {"step-1": one, "step-two": two, "notes": {}}, 1),
    ]


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


def _judge_pointed(fn: Callable[..., Any]) -> str:
    if problem := failures.check_pointed(fn):
        raise Wrong(problem)
    return "latest names a whole checkpoint, with the power failing before each operation and after the last"


def _judge_newest(fn: Callable[..., Any]) -> str:
    cases = _cases()
    outcomes = call_each(fn, [(folders,) for _, folders, _ in cases])
    for (words, _, expected), (fine, value) in zip(cases, outcomes, strict=True):
        if not fine:
            raise Wrong(ended(words, value))
        found = plain(value)
        if found != expected or type(found) is not type(expected):
            raise Wrong(f"{words}: got {found!r}, expected {expected}")
    return f"the newest whole checkpoint in {len(cases)} folders, damaged ones among them"


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

newest = Implement(
    "crash_safety-3",
    "The newest that is whole",
    "Write `newest(folders)`: the highest step whose folder is whole, by its index and checksums.",
    judge=_judge_newest,
    minutes=20,
    points=3,
    hints=(
        "Go through the folders from the highest step down, and return the first that is whole. Is 9 before 10?",
        "json.loads of half an index raises ValueError, and other bytes may give no dict: such folders are not whole.",
        "Compare three things: the step in the index, the names that it lists, and crc32 of each file's bytes.",
    ),
)
