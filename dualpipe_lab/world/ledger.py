"""The ledger: what every rank communicated, counted.

Chapter: book/start/ranks-and-messages.  In: one entry per call.  Out: counts, bytes, peers per rank and operation.
Peer messages are counted as sent; collectives by the algorithm that needs the fewest bytes (`traffic.py`).
Elsewhere: torch's flight recorder keeps collectives only; `NCCL_DEBUG=INFO` prints them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape


@dataclass
class Entry:
    """One operation of one rank, summed over its calls."""

    count: int = 0
    sent: int = 0
    received: int = 0
    peers: set[int] = field(default_factory=set)


class RankLedger:
    """What one rank communicated: `{operation: Entry}`."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}

    def add(
        self, operation: str, sent: int, received: int, peers: set[int], sent_to: dict[int, int] | None = None
    ) -> None:
        """Count one call; `sent_to` are the bytes addressed to each peer, where they do not all go to the next one."""
        entry = self.entries.setdefault(operation, Entry())
        entry.count += 1
        entry.sent += sent
        entry.received += received
        entry.peers |= peers


class Ledger:
    """What all ranks of a launch communicated; prints as a table.

    >>> first, second = RankLedger(), RankLedger()
    >>> first.add("isend", 16, 0, {1}); second.add("irecv", 0, 16, {0})
    >>> print(Ledger([first, second]))
    rank  operation  count  sent (B)  received (B)  peers
       0  isend          1        16             0  1
       1  irecv          1         0            16  0
    """

    def __init__(self, ranks: list[RankLedger]) -> None:
        self.ranks = ranks

    def count(self, operation: str | None = None, rank: int | None = None) -> int:
        """Number of calls, of one operation or all, on one rank or all."""
        return sum(entry.count for entry in self._select(operation, rank))

    def sent(self, operation: str | None = None, rank: int | None = None) -> int:
        """Bytes sent, by one operation or all, from one rank or all."""
        return sum(entry.sent for entry in self._select(operation, rank))

    def received(self, operation: str | None = None, rank: int | None = None) -> int:
        """Bytes received, by one operation or all, on one rank or all."""
        return sum(entry.received for entry in self._select(operation, rank))

    def peers(self, rank: int, operation: str | None = None) -> set[int]:
        """The ranks that `rank` communicated with."""
        return set().union(*(entry.peers for entry in self._select(operation, rank)))

    def rows(self) -> list[tuple[int, str, int, int, int, str]]:
        """Rank, operation, count, bytes sent, bytes received, peers: one row per rank and operation."""
        return [
            (rank, name, entry.count, entry.sent, entry.received, " ".join(map(str, sorted(entry.peers))))
            for rank, ledger in enumerate(self.ranks)
            for name, entry in ledger.entries.items()
        ]

    def _select(self, operation: str | None, rank: int | None) -> Iterator[Entry]:
        chosen = self.ranks if rank is None else [self.ranks[rank]]
        for ledger in chosen:
            yield from (entry for name, entry in ledger.entries.items() if operation in (None, name))

    def __str__(self) -> str:
        if not self.rows():
            return "no rank communicated through dualpipe_lab.comm"
        table = [_HEADER, *([f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in self.rows())]
        widths = [max(len(row[column]) for row in table) for column in range(len(_HEADER))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if column in _TEXT_COLUMNS else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        )

    __repr__ = __str__  # a notebook without HTML shows the table too

    def _repr_html_(self) -> str:
        if not self.rows():
            return f"<p>{escape(str(self))}</p>"
        header = "".join(_cell("th", column, name) for column, name in enumerate(_HEADER))
        body = "".join(
            f"<tr>{''.join(_cell('td', column, value) for column, value in enumerate(row))}</tr>" for row in self.rows()
        )
        return f'<table class="dp-ledger"><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>'


def _cell(tag: str, column: int, value: object) -> str:
    side = "left" if column in _TEXT_COLUMNS else "right"  # inline: a notebook has no style sheet of ours
    text = f"{value:,}" if isinstance(value, int) else escape(str(value))
    return f'<{tag} style="text-align:{side};padding:0.2rem 0.8rem">{text}</{tag}>'


_HEADER = ["rank", "operation", "count", "sent (B)", "received (B)", "peers"]
_TEXT_COLUMNS = (1, 5)
