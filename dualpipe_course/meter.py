"""`Meter` and `MemoryMeter`: what a rank spends, counted on the rank itself; nothing of the checks is imported.

In: nothing.  Out: bytes sent, calls and milliseconds of a lap; bytes of tensors that came to life.
"""

from typing import NamedTuple

SENT, RECEIVED = ("send", "isend"), ("recv", "irecv")
HALVES = {"all_reduce": 2}  # of a ring: N - 1 messages each; other collectives are one


class Spent(NamedTuple):
    """What a rank has spent in a while.

    Attributes:
        bytes: that it sent.
        calls: of collectives and messages.
        ms: milliseconds.
        messages: that it sent, where a collective counts as the messages of its ring: of one's own or the library's.
    """

    bytes: int
    calls: int
    ms: float
    messages: int


class Meter:
    """On a rank: counts from one `lap` to the next; the first begins when it is made."""

    def __init__(self) -> None:
        self._last = self._reading()

    def lap(self) -> Spent:
        """What was spent since the last lap."""
        before, self._last = self._last, self._reading()
        sent, calls, ms, messages = (now - then for now, then in zip(self._last, before, strict=True))
        return Spent(sent, calls, ms / 1e6, messages)

    @staticmethod
    def _reading() -> tuple[int, int, int, int]:
        from dualpipe_lab import comm
        from dualpipe_lab.launch.context import now, rank_context

        entries, others = rank_context().ledger.entries, comm.get_world_size() - 1
        messages = sum(
            entry.count * (1 if name in SENT else HALVES.get(name, 1) * others)
            for name, entry in entries.items()
            if name not in RECEIVED
        )
        sent = sum(entry.sent for entry in entries.values())
        return sent, sum(entry.count for entry in entries.values()), now(), messages


class MemoryMeter:
    """On a rank: bytes of tensors that are alive now and were not when it was made, wherever they are kept.

    A view of a large tensor counts as the large tensor.
    """

    def __init__(self) -> None:
        import gc

        from dualpipe_lab.dp.measure import live_bytes

        gc.freeze()  # what is there already is left out of all readings, which are quick then
        self._before = live_bytes()

    def grown(self) -> int:
        """Bytes more than at the beginning."""
        from dualpipe_lab.dp.measure import live_bytes

        return live_bytes() - self._before
