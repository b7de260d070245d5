"""Times that travel beside the messages: each rank appends to a file of its own, the others read it.

A stamp is written before the real message leaves, so whoever holds the message finds its stamp.  A record is 32 bytes,
a divisor of the page size: a reader never sees half of one.
"""

import os
import struct
from collections import defaultdict, deque
from pathlib import Path

_RECORD = struct.Struct("<qqqq")  # stream, key, time in ns, unused


class Stamps:
    """The stamps of one launch as one rank sees them: it writes its own and reads everybody's."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._own = os.open(self._path(rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self._readers: dict[int, _Reader] = {}

    def write(self, stream: int, key: int, time_ns: int) -> None:
        """Publish a time under `(stream, key)`."""
        os.write(self._own, _RECORD.pack(stream, key, time_ns, 0))

    def take(self, writer: int, stream: int, key: int) -> int | None:
        """Return the next unread time that rank `writer` published under `(stream, key)`; None if there is none yet."""
        if writer not in self._readers:
            if not self._path(writer).exists():
                return None  # that rank has not begun
            self._readers[writer] = _Reader(self._path(writer))
        return self._readers[writer].take(stream, key)

    def _path(self, rank: int) -> Path:
        return self._folder / f"stamps-{rank}"


class _Reader:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self._offset = 0
        self._unread: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)

    def take(self, stream: int, key: int) -> int | None:
        if not self._unread[stream, key]:
            self._read_more()
        queue = self._unread[stream, key]
        time_ns = queue.popleft() if queue else None
        if not queue:
            del self._unread[stream, key]
        return time_ns

    def _read_more(self) -> None:
        while data := os.pread(self._file, 1 << 16, self._offset):
            self._offset += len(data)
            for stream, key, time_ns, _ in _RECORD.iter_unpack(data):
                self._unread[stream, key].append(time_ns)
