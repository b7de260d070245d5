"""`Calls`: the communication calls of one rank without a process, by operation and group: as a ledger, or as seconds.

In: the arguments of a call, as the rank would make it, and how often.  Out: counts, bytes and peers, as in the ledger
of a run, by its formulas (`dualpipe_lab.launch.record.traffic`); or seconds, of which receives take none.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Self

from dualpipe_lab.launch.record import traffic
from dualpipe_lab.launch.record.ledger import Entry, RankLedger
from dualpipe_lab.launch.record.operation import next_in_ring
from dualpipe_lab.plan.hardware import Hardware, collective_seconds, exchange_seconds, message_seconds

Ranks = tuple[int, ...]


class Calls:
    """The calls of one rank.

    Attributes:
        rank: that makes them.
        found: by operation and ranks of the group.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.found: dict[tuple[str, Ranks], Entry] = {}

    def all_reduce(self, ranks: Ranks, numel: int, element_bytes: int, times: int = 1) -> None:
        chunks = [part * element_bytes for part in traffic.split(numel, len(ranks))]
        place = ranks.index(self.rank)
        moved = traffic.all_reduce(chunks, place)
        self._enter("all_reduce", ranks, moved, {ranks[place - 1]: moved.sent}, times)  # GLOO's ring runs down

    def all_gather(self, ranks: Ranks, numel: int, element_bytes: int, times: int = 1) -> None:
        moved = traffic.all_gather([numel * element_bytes] * len(ranks), ranks.index(self.rank))
        self._enter("all_gather_single", ranks, moved, {next_in_ring(ranks, self.rank): moved.sent}, times)

    def reduce_scatter(self, ranks: Ranks, numel: int, element_bytes: int, times: int = 1) -> None:
        shards = [numel // len(ranks) * element_bytes] * len(ranks)
        moved = traffic.reduce_scatter(shards, ranks.index(self.rank))
        self._enter("reduce_scatter_single", ranks, moved, dict(zip(ranks, shards, strict=True)), times)  # no ring

    def all_to_all(
        self, ranks: Ranks, sends: Sequence[int], receives: Sequence[int], times: int = 1, count: int | None = None
    ) -> None:
        """Enter `count` calls (default: `times`), which move these bytes `times` times together."""
        moved = traffic.all_to_all(sends, receives, ranks.index(self.rank))
        self._enter("all_to_all_single", ranks, moved, dict(zip(ranks, sends, strict=True)), times, count)

    def send(self, ranks: Ranks, peer: int, num_bytes: int, times: int = 1) -> None:
        self._enter("isend", ranks, traffic.Traffic(num_bytes, 0, 1), {peer: num_bytes}, times)

    def receive(self, ranks: Ranks, peer: int, num_bytes: int, times: int = 1) -> None:
        self._enter("irecv", ranks, traffic.Traffic(0, num_bytes, 1), {peer: 0}, times)

    def exchange(self, ranks: Ranks, peer: int, num_bytes: int, times: int = 1) -> None:
        self.send(ranks, peer, num_bytes, times)
        self.receive(ranks, peer, num_bytes, times)

    def add(self, other: "Calls", times: int = 1) -> Self:
        """Enter the calls of another object, so many times."""
        for key, entry in other.found.items():
            _add(self.found.setdefault(key, Entry()), entry, times)
        return self

    @property
    def ledger(self) -> RankLedger:
        """The calls by operation."""
        total = RankLedger()
        for (operation, _), entry in self.found.items():
            _add(total.found.setdefault(operation, Entry()), entry)
        return total

    def seconds(self, hardware: Hardware, ranks_per_node: int) -> Iterator[tuple[str, Ranks, float]]:
        """Yield operation, ranks and seconds; they grow with the bytes, so calls of one kind are counted together."""
        for (operation, ranks), entry in self.found.items():
            here = sum(rank // ranks_per_node == self.rank // ranks_per_node for rank in ranks)
            if len(ranks) == 1 or operation == "irecv":
                continue
            if operation == "isend":
                across = ranks[0] // ranks_per_node != ranks[-1] // ranks_per_node
                seconds = message_seconds(entry.sent, across_nodes=across, hardware=hardware)
            elif operation == "all_to_all_single":
                seconds = exchange_seconds(entry.sent, len(ranks), per_node=here, hardware=hardware)
            else:
                seconds = collective_seconds(
                    entry.sent, len(ranks), across_nodes=here < len(ranks), per_node=here, hardware=hardware
                )
            yield operation, ranks, seconds + (entry.count - 1) * hardware.latency

    def _enter(
        self,
        operation: str,
        ranks: Ranks,
        moved: traffic.Traffic,
        sent_to: dict[int, int],
        times: int,
        count: int | None = None,
    ) -> None:
        entry = self.found.setdefault((operation, ranks), Entry())
        entry.count += times if count is None else count
        entry.sent += times * moved.sent
        entry.received += times * moved.received
        entry.peers |= set(sent_to if operation in ("isend", "irecv") else ranks) - {self.rank}
        for peer in sent_to:
            if peer != self.rank:
                entry.sent_to[peer] += times * sent_to[peer]


def total(calls: Iterable[Calls], rank: int) -> Calls:
    """Return the calls of several objects together."""
    found = Calls(rank)
    for one in calls:
        found.add(one)
    return found


def _add(entry: Entry, other: Entry, times: int = 1) -> None:
    entry.count += times * other.count
    entry.sent += times * other.sent
    entry.received += times * other.received
    entry.peers |= other.peers
    for peer, num_bytes in other.sent_to.items():
        entry.sent_to[peer] += times * num_bytes
