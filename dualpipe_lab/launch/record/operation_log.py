"""The operation log: the last operations of a rank in a file, which the launcher reads after the rank has died.

In: operations as they begin and end.  Out: `mismatch`, one sentence on the calls of both sides.
GLOO ends the process (SIGABRT) when more bytes arrive than the tensor holds, which happens when shapes or dtypes
differ.  A dead rank cannot report its status, so each rank logs its calls in the private folder of the launch.
Elsewhere: torch's flight recorder.
"""

import marshal
import mmap
from dataclasses import dataclass
from pathlib import Path

from dualpipe_lab.launch.record.operation import Operation
from dualpipe_lab.launch.record.traffic import Traffic

SLOTS, SLOT_BYTES = 64, 512
_BEGUN, _ENDED = b"B", b"E"
RULE = "a tensor needs the same shape and dtype on every rank that takes part"


@dataclass(frozen=True)
class LoggedOperation:
    """One entry of the log; the fields are those of `Operation`."""

    ended: bool
    text: str
    signature: str
    num_bytes: int
    sends: bool | None
    peer: int | None
    stream: int
    sequence: int


class OperationLog:
    """Ring buffer of the last `SLOTS` operations of one rank, in a memory-mapped file."""

    def __init__(self, path: Path) -> None:
        with open(path, "w+b") as file:
            file.truncate(SLOTS * SLOT_BYTES)
            self._memory = mmap.mmap(file.fileno(), SLOTS * SLOT_BYTES)
        self._count = 0

    def begin(self, of: Operation) -> None:
        """Log an operation that is about to be issued, field by field: text is made by whoever reads it."""
        of.slot = self._count % SLOTS
        self._count += 1
        moved = of.traffic.sent if of.sends else of.traffic.received
        entry = of.name, of.shape, of.dtype, of.root, of.peer, of.tag, of.label, of.sends, moved, of.stream, of.sequence
        data = _BEGUN + marshal.dumps(entry)
        if len(data) <= SLOT_BYTES:
            start = of.slot * SLOT_BYTES
            self._memory[start : start + len(data)] = data

    def end(self, operation: Operation) -> None:
        """Log the end of an operation."""
        start = operation.slot * SLOT_BYTES
        self._memory[start : start + 1] = _ENDED


def read(path: Path) -> list[LoggedOperation]:
    """The operations in a rank's log; empty if there is none."""
    data = path.read_bytes() if path.exists() else b""
    slots = (data[start : start + SLOT_BYTES] for start in range(0, len(data), SLOT_BYTES))
    return [_entry(slot[:1] == _ENDED, *marshal.loads(slot[1:])) for slot in slots if slot[:1] != b"\0"]  # noqa: S302


def _entry(
    ended: bool, name: str, shape: tuple[int, ...], dtype: str, root: int | None, peer: int | None, tag: int,
    label: str, sends: bool | None, moved: int, stream: int, sequence: int,
) -> LoggedOperation:  # fmt: skip
    told = Operation(name, (), Traffic(0, 0, 0), shape, peer, tag, sends=sends, label=label, dtype=dtype, root=root)
    return LoggedOperation(ended, told.describe(), told.signature, moved, sends, peer, stream, sequence)


def mismatch(logs: dict[int, list[LoggedOperation]], dead: int) -> str:
    """The call of a rank that GLOO ended and the call that did not fit it; empty if the rank was not communicating."""
    under_way = [entry for entry in logs.get(dead, []) if not entry.ended]
    for mine in under_way:
        for rank, entries in logs.items():
            theirs = next((entry for entry in entries if rank != dead and _clash(mine, entry, dead, rank)), None)
            if theirs:
                return f"rank {dead} called {_call(mine)}, rank {rank} {_call(theirs)}; {RULE}"
    if not under_way:
        return ""
    waited = " and ".join(entry.text for entry in under_way[:3])
    return f"more bytes came than its tensor has room for, in {waited}; {RULE}"


def _clash(mine: LoggedOperation, theirs: LoggedOperation, dead: int, rank: int) -> bool:
    """Whether two entries belong to one operation and do not fit."""
    if mine.stream != theirs.stream:
        return False
    if mine.sends is None:
        return mine.sequence == theirs.sequence and mine.signature != theirs.signature
    meant = theirs.peer == dead and mine.peer in (rank, None)
    return bool(meant and mine.sends is False and theirs.sends and theirs.num_bytes > mine.num_bytes)


def _call(entry: LoggedOperation) -> str:
    return entry.signature if entry.sends is None else entry.text
