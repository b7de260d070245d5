"""Exercises of "Saves that survive a crash": failures that show a flaw, a pointer.

Chapter: book/dp/crash-safety.  Operations run on a disk that forgets what was not synced.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, combinations
from typing import Any

from dualpipe_course.declared import Puzzle, Repair
from dualpipe_course.dp import failures
from dualpipe_course.plain import plain
from dualpipe_course.wrong import Wrong

_PARTS = ("write run/.new/a", "write run/.new/b", "sync run/.new/a", "sync run/.new/b")
LOGS = {
    "north": ("mkdir run/.new", *_PARTS[:3], "sync run/.new", "rename run/.new run/step-2", "sync run"),
    "east": ("mkdir run/.new", *_PARTS, "rename run/.new run/step-2", "sync run/step-2", "sync run"),
    "south": ("mkdir run/.new", "sync run", *_PARTS, "sync run/.new", "rename run/.new run/step-2"),
    "west": ("mkdir run/.new", *_PARTS, "sync run/.new", "rename run/.new run/step-2", "sync run"),
}


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
