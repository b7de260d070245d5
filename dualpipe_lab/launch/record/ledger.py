"""The ledger: calls, bytes and peers of every rank, by operation.

Chapter: book/start/ranks-and-messages.  In: one entry per call.  Out: counts, bytes, peers per rank and operation.
Messages are counted one by one.  The bytes of a collective are derived from the call (`traffic.py`).  After
`launch(..., wire=True)` the ledger also has the bytes that left the rank's sockets (`wire.py`), in multiples of the
tensor, to 0.01.  Tensors of less than 1 MiB are left out there, because GLOO's headers are counted too.
Elsewhere: torch's flight recorder keeps collectives only; `NCCL_DEBUG=INFO` prints them.
"""

from collections import Counter, UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape
from math import floor
from typing import Any

SMALLEST = 1 << 20  # bytes: smaller tensors have no column on the wire


@dataclass
class Entry:
    """Sums over all calls of one operation on one rank.

    Attributes:
        count, sent, received, peers: calls, bytes, and the ranks at the other ends.
        tensor_bytes: of the full tensors.
        sent_to: bytes sent to each rank.
        wire: bytes that left the sockets; None if the wire was not read.
    """

    count: int = 0
    sent: int = 0
    received: int = 0
    peers: set[int] = field(default_factory=set)
    tensor_bytes: int = 0
    wire: int | None = None
    sent_to: Counter[int] = field(default_factory=Counter)

    @property
    def is_large(self) -> bool:
        """Whether the tensors have 1 MiB or more on average."""
        return self.tensor_bytes >= self.count * SMALLEST


class Entries(UserDict[str, Entry]):
    """`{operation: Entry}`, complete whenever it is read: what the recorder has kept is entered first."""

    def __init__(self, found: dict[str, Entry], pull: Callable[[], object]) -> None:
        self._found, self._pull = found, pull

    @property
    def data(self) -> dict[str, Entry]:  # type: ignore[override]
        """What `UserDict` reads."""
        self._pull()
        return self._found


class RankLedger:
    """Ledger of one rank: `entries` is `{operation: Entry}`.

    Attributes:
        found: the entries so far, without those that the recorder has kept.
        pull: enters them.
    """

    pull: Callable[[], object] = staticmethod(int)  # of a ledger without a recorder: there is nothing to enter

    def __init__(self) -> None:
        self.found: dict[str, Entry] = {}

    @property
    def entries(self) -> Entries:
        """Entries by operation."""
        return Entries(self.found, self.pull)

    def __getstate__(self) -> dict[str, Any]:
        self.pull()
        return {name: value for name, value in self.__dict__.items() if name != "pull"}

    def add(
        self, operation: str, sent: int, received: int, peers: set[int], sent_to: dict[int, int] | None = None
    ) -> None:
        """Enter one call; `sent_to` has the bytes sent to each peer, unless all bytes go to the next rank."""
        entry = self.found.setdefault(operation, Entry())
        entry.count += 1
        entry.sent += sent
        entry.received += received
        entry.peers |= peers

    def enter_wire(self, sent: dict[str, int]) -> None:
        """Enter the bytes that left the sockets, by operation; `isend` includes `send`, unless the rank called both."""
        entries = self.entries
        messages = [name for name in ("isend", "send") if name in entries]
        for name, known in sent.items():
            for found in messages if name == "isend" and len(messages) == 1 else {name} & entries.keys():
                entry, is_both = entries[found], name == "isend" and len(messages) == 2
                entry.wire = None if is_both else known


class Ledger:
    """Ledger of all ranks of a launch; it prints as a table.

    >>> first, second = RankLedger(), RankLedger()
    >>> first.add("isend", 16, 0, {1}); second.add("irecv", 0, 16, {0})
    >>> print(Ledger([first, second]))
    rank  operation  count  sent (B)  received (B)  peers
       0  isend          1        16             0  1
       1  irecv          1         0            16  0

    Args:
        ranks: one ledger per rank.
        shows_wire: whether the launch counted the bytes on the wire.
        obstacle: reason why they could not be counted; empty if they were.
    """

    def __init__(self, ranks: list[RankLedger], shows_wire: bool = False, obstacle: str = "") -> None:
        self.ranks, self.shows_wire, self.obstacle = ranks, shows_wire, obstacle

    def count(self, operation: str | None = None, rank: int | None = None) -> int:
        """Number of calls of one operation or all, on one rank or all."""
        return sum(entry.count for entry in self._select(operation, rank))

    def sent(self, operation: str | None = None, rank: int | None = None) -> int:
        """Bytes sent by one operation or all, from one rank or all."""
        return sum(entry.sent for entry in self._select(operation, rank))

    def received(self, operation: str | None = None, rank: int | None = None) -> int:
        """Bytes received by one operation or all, on one rank or all."""
        return sum(entry.received for entry in self._select(operation, rank))

    def derived(
        self, operation: str | None = None, rank: int | None = None, tensor_bytes: int | None = None
    ) -> float | None:
        """Bytes sent, derived from the calls, in multiples of the tensor; arguments as in `on_the_wire`."""
        chosen = list(self._select(operation, rank))
        return _multiple([entry.sent for entry in chosen], chosen, tensor_bytes)

    def on_the_wire(
        self, operation: str | None = None, rank: int | None = None, tensor_bytes: int | None = None
    ) -> float | None:
        """Bytes that left the sockets, in multiples of the tensor, to 0.01.

        Args:
            operation: name of one operation; by default the sum of all.
            rank: number of one rank; by default the sum of all.
            tensor_bytes: bytes of the tensor; by default of all tensors passed to the calls together.

        Returns:
            The multiple; None if the wire was not read or the tensors are smaller than 1 MiB.
        """
        chosen = [entry for entry in self._select(operation, rank) if entry.sent or entry.wire is not None]
        return _multiple([entry.wire for entry in chosen], chosen, tensor_bytes)

    def beside(self, tensor_bytes: int, rank: int = 0) -> str:
        """Table of the bytes that one rank sent, derived and on the wire, in multiples of a tensor; `-`: unknown."""
        lines = [f"{f'rank {rank}, in {tensor_bytes:,} B':24}  derived  on the wire"]
        for name in self.ranks[rank].entries:
            derived, wire = (how(name, rank, tensor_bytes) for how in (self.derived, self.on_the_wire))
            if derived or wire:
                lines.append(f"{name:24}  {derived or 0:7.2f}  {'-' if wire is None else f'{wire:.2f}':>11}")
        return "\n".join(lines)

    def by_node(self, ranks_per_node: int, operation: str | None = None) -> list[list[int]]:
        """Bytes sent, derived, from each node (a row) to each node (a column); those within a node are the diagonal.

        Args:
            ranks_per_node: consecutive ranks that share a machine.
            operation: name of one operation; by default the sum of all.

        Raises:
            ValueError: nodes that the ranks do not fill.

        >>> first, second = RankLedger(), RankLedger()
        >>> first.add("isend", 16, 0, {1}); first.entries["isend"].sent_to[1] += 16
        >>> Ledger([first, second]).by_node(1), Ledger([first, second]).by_node(2)
        ([[0, 16], [0, 0]], [[16]])
        """
        size = len(self.ranks)
        if ranks_per_node < 1 or size % ranks_per_node:
            raise ValueError(f"ranks_per_node must divide the ranks, got {ranks_per_node} and {size} ranks")
        found = [[0] * (size // ranks_per_node) for _ in range(size // ranks_per_node)]
        for rank in range(size):
            for entry in self._select(operation, rank):
                for peer, num_bytes in entry.sent_to.items():
                    found[rank // ranks_per_node][peer // ranks_per_node] += num_bytes
        return found

    def between_nodes(self, ranks_per_node: int, operation: str | None = None) -> int:
        """Bytes that all ranks send to other nodes, derived; arguments and errors as `by_node`."""
        rows = self.by_node(ranks_per_node, operation)
        return sum(num_bytes for node, row in enumerate(rows) for other, num_bytes in enumerate(row) if node != other)

    def peers(self, rank: int, operation: str | None = None) -> set[int]:
        """Ranks with which `rank` communicated."""
        return set().union(*(entry.peers for entry in self._select(operation, rank)))

    def rows(self) -> list[tuple[int | str, ...]]:
        """Rank, operation, count, bytes sent, bytes received, peers: one row per rank and operation.

        With the wire, two more: sent as derived and sent on the wire, in multiples of the tensor.
        """
        rows: list[tuple[int | str, ...]] = []
        for rank, ledger in enumerate(self.ranks):
            for name, entry in ledger.entries.items():
                peers = " ".join(map(str, sorted(entry.peers)))
                rows.append((rank, name, entry.count, entry.sent, entry.received, peers, *self._multiples(entry)))
        return rows

    def _multiples(self, entry: Entry) -> list[str]:
        found = [_multiple([sent], [entry], None) for sent in (entry.sent, entry.wire)] if self._has_wire else []
        return ["" if multiple is None else f"{multiple:.2f}" for multiple in found]

    @property
    def _has_wire(self) -> bool:
        return self.shows_wire and not self.obstacle

    @property
    def _header(self) -> list[str]:
        return [*_HEADER, *(_WIRE_HEADER if self._has_wire else [])]

    @property
    def _note(self) -> str:
        """Note below the table on the columns of the wire."""
        if not self.shows_wire:
            return ""
        if self.obstacle:
            return f"on the wire: not counted, {self.obstacle}"
        sends = [entry for entry in self._select(None, None) if entry.sent]
        few = any(not entry.is_large for entry in sends)
        return "on the wire: empty for tensors of less than 1 MiB" if few else ""

    def _select(self, operation: str | None, rank: int | None) -> Iterator[Entry]:
        chosen = self.ranks if rank is None else [self.ranks[rank]]
        for ledger in chosen:
            yield from (entry for name, entry in ledger.entries.items() if operation in (None, name))

    def __str__(self) -> str:
        if not self.rows():
            return "no rank communicated through dualpipe_lab.comm"
        rows = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in self.rows()]
        table = [self._header, *rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        aligned = [str.ljust if column in _TEXT_COLUMNS else str.rjust for column in range(len(widths))]
        lines = ["  ".join(map(lambda align, *cell: align(*cell), aligned, row, widths)).rstrip() for row in table]
        return "\n".join([*lines, *filter(None, [self._note])])

    __repr__ = __str__  # a notebook without HTML shows the table too

    def _repr_html_(self) -> str:
        if not self.rows():
            return f"<p>{escape(str(self))}</p>"
        header = "".join(_cell("th", column, name) for column, name in enumerate(self._header))
        body = "".join(
            f"<tr>{''.join(_cell('td', column, value) for column, value in enumerate(row))}</tr>" for row in self.rows()
        )
        note = f"<caption>{escape(self._note)}</caption>" if self._note else ""
        return f'<table class="dp-ledger">{note}<thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>'


def _multiple(sent: list[int | None], entries: list[Entry], tensor_bytes: int | None) -> float | None:
    """Bytes sent divided by bytes of the tensor, to 0.01; None if a part is not known or the tensors are small."""
    known = [num_bytes for num_bytes in sent if num_bytes is not None]
    of = sum(entry.tensor_bytes for entry in entries) if tensor_bytes is None else tensor_bytes
    is_large = sum(entry.count for entry in entries) * SMALLEST <= of if tensor_bytes is None else of >= SMALLEST
    if len(known) < len(sent) or not is_large or not of:
        return None
    return floor(100 * sum(known) / of + 0.5) / 100  # half up, so that 0.125 and a header more are both 0.13


def _cell(tag: str, column: int, value: object) -> str:
    side = "left" if column in _TEXT_COLUMNS else "right"  # inline: a notebook has no style sheet of ours
    text = f"{value:,}" if isinstance(value, int) else escape(str(value))
    return f'<{tag} style="text-align:{side};padding:0.2rem 0.8rem">{text}</{tag}>'


_HEADER = ["rank", "operation", "count", "sent (B)", "received (B)", "peers"]
_WIRE_HEADER = ["derived (tensors)", "on the wire (tensors)"]
_TEXT_COLUMNS = (1, 5)
