"""What a rank answers when it is asked where it is: its operation, its messages and its line in the cell.

The answer is given by a thread of its own, so it comes while the rank is blocked inside GLOO.  Ranks that call
`torch.distributed` directly are understood from the frame they are blocked in.
"""

import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from dualpipe_lab.world.record.operation import Communicator, Operation

HISTORY_LENGTH = 1_000  # collectives per communicator that are compared across the ranks


@dataclass(frozen=True)
class Frame:
    """A line of code: file, line number, function."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Blocked:
    """The operation that a rank waits for, as far as it is known.

    `sends` is None for a collective; `communicator` and `sequence` are known when it went through `dualpipe_lab.comm`.
    """

    name: str
    text: str
    sends: bool | None = None
    peer: int | None = None
    tag: int = 0
    communicator: Communicator | None = None
    sequence: int = 0


@dataclass(frozen=True)
class Whereabouts:
    """One rank's answer.

    Attributes:
        blocked: the operation it waits for; None while it computes.
        in_flight: True while an emulated transfer is under way, which is no deadlock.
        completed: operations finished so far.
        cpu_seconds: processor time used so far; a rank that moves bytes uses some, a deadlocked one does not.
        posted, received: messages by (peer, tag).
        joined, history: collectives begun, by communicator: how many, and which.
        frames: where its main thread is, innermost last.
    """

    rank: int
    blocked: Blocked | None
    in_flight: bool
    waited_seconds: float
    completed: int
    cpu_seconds: float
    posted: Counter[tuple[int, int]]
    received: Counter[tuple[int, int]]
    joined: dict[Communicator, int]
    history: dict[Communicator, list[str]]
    frames: list[Frame]


@dataclass
class Progress:
    """The table from which a rank answers; `comm` keeps it up to date."""

    rank: int
    current: Operation | None = None
    since: float = 0.0
    in_flight: bool = False
    completed: int = 0
    posted: Counter[tuple[int, int]] = field(default_factory=Counter)
    received: Counter[tuple[int, int]] = field(default_factory=Counter)
    joined: dict[Communicator, int] = field(default_factory=dict)
    history: dict[Communicator, list[str]] = field(default_factory=dict)

    def join(self, operation: Operation) -> None:
        """Number a collective that is being issued."""
        communicator = operation.communicator
        operation.sequence = self.joined.get(communicator, 0)
        self.joined[communicator] = operation.sequence + 1
        if operation.sequence < HISTORY_LENGTH:
            self.history.setdefault(communicator, []).append(operation.signature)

    def wait(self, operation: Operation) -> None:
        """Note that the rank now waits for an operation."""
        self.current, self.since = operation, time.perf_counter()

    def end(self) -> None:
        """Note that the operation is over."""
        self.current, self.in_flight = None, False
        self.completed += 1

    def answer(self) -> Whereabouts:
        """Say where the main thread of this process is; called from another thread."""
        stack = _main_stack()
        current = self.current
        blocked = _from_operation(current) if current else _from_torch(stack)
        return Whereabouts(
            rank=self.rank,
            blocked=blocked,
            in_flight=self.in_flight,
            waited_seconds=time.perf_counter() - self.since if current else 0.0,
            completed=self.completed,
            cpu_seconds=time.process_time(),
            posted=Counter(self.posted),
            received=Counter(self.received),
            joined=dict(self.joined),
            history={communicator: list(names) for communicator, names in list(self.history.items())},
            frames=[Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in stack],
        )


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
    """Recognise a blocking call of `torch.distributed` itself from the innermost of its frames."""
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
