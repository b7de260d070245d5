"""Status of a rank: the operation that it waits for, its messages so far, and the line that it runs.

A second thread takes the snapshot, also while the main thread is blocked inside GLOO.  For a rank that calls
`torch.distributed` directly, the operation is read from the stack frame in which it is blocked.
"""

import gc
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from dualpipe_lab.launch.record.operation import Communicator, Operation, signature_of

HISTORY_LENGTH = 1_000  # collectives per communicator that are compared across the ranks


@dataclass(frozen=True)
class StackFrame:
    """One frame of a stack: file, line number, function."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Blocked:
    """The operation that a rank waits for.

    `sends` is None for a collective.  `communicator` and `sequence` are set for an operation of `dualpipe_lab.comm`.
    """

    name: str
    text: str
    sends: bool | None = None
    peer: int | None = None
    tag: int = 0
    communicator: Communicator | None = None
    sequence: int = 0


@dataclass(frozen=True)
class RankStatus:
    """Status of one rank at one time.

    Attributes:
        rank: number of the rank.
        blocked: the operation that the rank waits for; None while it computes.
        in_flight: True while an emulated transfer is under way, which is no deadlock.
        waited_seconds: time since the rank began to wait for `blocked`.
        completed: number of operations completed.
        cpu_seconds: processor time used; it grows while a rank moves bytes and stands still in a deadlock.
        sent, received: number of messages by (peer, tag).
        joined, history: number and signatures of the collectives begun, by communicator.
        frames: stack of the main thread, innermost frame last.
    """

    rank: int
    blocked: Blocked | None
    in_flight: bool
    waited_seconds: float
    completed: int
    cpu_seconds: float
    sent: Counter[tuple[int, int]]
    received: Counter[tuple[int, int]]
    joined: dict[Communicator, int]
    history: dict[Communicator, list[str]]
    frames: list[StackFrame]


@dataclass
class StatusTracker:
    """Counts of one rank's operations and the one that it waits for; the recorder writes them.

    `last` is the operation that was begun or waited for last, also when an exception has ended the wait; it is `ended`
    too if its wait is over.
    """

    rank: int
    current: Operation | None = None
    since: float = 0.0
    in_flight: bool = False
    last: Operation | None = None
    ended: Operation | None = None
    completed: int = 0
    sent: Counter[tuple[int, int]] = field(default_factory=Counter)
    received: Counter[tuple[int, int]] = field(default_factory=Counter)
    joined: Counter[tuple[tuple[int, ...], str]] = field(default_factory=Counter)
    history: defaultdict[tuple[tuple[int, ...], str], list[tuple[Any, ...]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def snapshot(self) -> RankStatus:
        """Status of this process's main thread; another thread calls this."""
        current = self.current
        with _no_collection():
            stack = _main_stack()
            blocked = _from_operation(current) if current else _from_torch(stack)
            frames = [StackFrame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in stack]
        return RankStatus(
            rank=self.rank,
            blocked=blocked,
            in_flight=self.in_flight,
            waited_seconds=time.perf_counter() - self.since if current else 0.0,
            completed=self.completed,
            cpu_seconds=time.process_time(),
            sent=Counter(self.sent),
            received=Counter(self.received),
            joined={Communicator(*group): number for group, number in list(self.joined.items())},
            history={
                Communicator(*group): [signature_of(*fields) for fields in list(calls)]
                for group, calls in list(self.history.items())
            },
            frames=frames,
        )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Read frames of the main thread inside of this block.

    Python 3.11 may collect garbage while it makes the object of a frame.  What is collected may be a process group,
    whose end lets the main thread run and leave the very frame, and this process crashes.  Later versions collect
    between two instructions.
    """
    collects = sys.version_info < (3, 12) and gc.isenabled()
    if collects:
        gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _main_stack() -> list[FrameType]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    return stack[::-1]


def _from_operation(operation: Operation) -> Blocked:
    return Blocked(
        operation.name,
        operation.describe(),
        operation.sends,
        operation.peer,
        operation.tag,
        operation.communicator if operation.is_collective else None,
        operation.sequence,
    )


def _from_torch(stack: list[FrameType]) -> Blocked | None:
    """Find a blocking call of `torch.distributed` itself in the stack, innermost first."""
    for frame in reversed(stack):
        if frame.f_code.co_filename.endswith("distributed_c10d.py") and not frame.f_code.co_name.startswith("_"):
            return _from_torch_frame(frame)
    return None


def _from_torch_frame(frame: FrameType) -> Blocked:
    name, values = frame.f_code.co_name, frame.f_locals
    if name in ("send", "recv"):
        peer = values.get("dst" if name == "send" else "src")
        text = f"{name} {'to' if name == 'send' else 'from'} rank {peer} tag {values.get('tag')}{_shape(values)}"
        return Blocked(name, text, name == "send", peer, values.get("tag") or 0)
    return Blocked(name, f"{name}{_shape(values)} (plain torch.distributed)")


def _shape(values: dict[str, Any]) -> str:
    tensor: Any = values.get("tensor", values.get("input", values.get("output")))
    return f" shape {tuple(tensor.shape)}" if hasattr(tensor, "shape") else ""
