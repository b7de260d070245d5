"""`Meter` and `MemoryMeter`: what a rank spends, counted on the rank itself; nothing of the checks is imported.

In: nothing.  Out: bytes sent, calls and milliseconds of a lap; bytes of tensors that came to life.
"""

from typing import NamedTuple


class Spent(NamedTuple):
    """What a rank has spent in a while: bytes that it sent, calls of collectives and messages, milliseconds."""

    bytes: int
    calls: int
    ms: float


class Meter:
    """On a rank: counts from one `lap` to the next; the first begins when it is made."""

    def __init__(self) -> None:
        self._last = self._reading()

    def lap(self) -> Spent:
        """What was spent since the last lap."""
        before, self._last = self._last, self._reading()
        sent, calls, ms = (now - then for now, then in zip(self._last, before, strict=True))
        return Spent(int(sent), int(calls), ms / 1e6)

    @staticmethod
    def _reading() -> tuple[int, int, int]:
        from dualpipe_lab.launch.context import now, rank_context

        entries = rank_context().ledger.entries.values()
        return sum(entry.sent for entry in entries), sum(entry.count for entry in entries), now()


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
