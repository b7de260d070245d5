"""`Calls`: the communication calls of one rank, entered into a ledger without a process.

In: the arguments of a call, as the rank would make it.  Out: counts, bytes and peers by operation, as in the ledger of
a run: the formulas are the ledger's (`dualpipe_lab.launch.record.traffic`).
"""

from collections.abc import Sequence

from dualpipe_lab.launch.record import traffic
from dualpipe_lab.launch.record.ledger import RankLedger
from dualpipe_lab.launch.record.operation import next_in_ring


class Calls:
    """The calls of one rank.

    Attributes:
        rank: in the world.
        ledger: what has been entered.

    >>> calls = Calls(0)
    >>> calls.all_reduce((0, 1), numel=3, element_bytes=4)
    >>> calls.ledger.entries["all_reduce"].sent
    12
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.ledger = rank, RankLedger()

    def all_reduce(self, ranks: Sequence[int], numel: int, element_bytes: int) -> None:
        chunks = [part * element_bytes for part in traffic.split(numel, len(ranks))]
        place = ranks.index(self.rank)
        before = ranks[place - 1]  # GLOO's ring runs down
        self._enter("all_reduce", traffic.all_reduce(chunks, place), ranks, to=before)

    def all_gather(self, ranks: Sequence[int], numel: int, element_bytes: int) -> None:
        moved = traffic.all_gather([numel * element_bytes] * len(ranks), ranks.index(self.rank))
        self._enter("all_gather_single", moved, ranks)

    def reduce_scatter(self, ranks: Sequence[int], numel: int, element_bytes: int) -> None:
        shard = numel // len(ranks) * element_bytes
        moved = traffic.reduce_scatter([shard] * len(ranks), ranks.index(self.rank))
        self._enter("reduce_scatter_single", moved, ranks, [shard] * len(ranks))  # GLOO has no ring for it

    def all_to_all(self, ranks: Sequence[int], sends: Sequence[int], receives: Sequence[int]) -> None:
        moved = traffic.all_to_all(sends, receives, ranks.index(self.rank))
        self._enter("all_to_all_single", moved, ranks, sends)

    def send(self, peer: int, num_bytes: int) -> None:
        self.ledger.add("isend", num_bytes, 0, {peer})
        self.ledger.entries["isend"].sent_to[peer] += num_bytes

    def receive(self, peer: int, num_bytes: int) -> None:
        self.ledger.add("irecv", 0, num_bytes, {peer})

    def exchange(self, peer: int, num_bytes: int) -> None:
        self.send(peer, num_bytes)
        self.receive(peer, num_bytes)

    def _enter(
        self,
        operation: str,
        moved: traffic.Traffic,
        ranks: Sequence[int],
        blocks: Sequence[int] | None = None,
        to: int | None = None,
    ) -> None:
        self.ledger.add(operation, moved.sent, moved.received, set(ranks) - {self.rank})
        sent_to = self.ledger.entries[operation].sent_to
        if blocks is not None:
            sent_to.update({rank: block for rank, block in zip(ranks, blocks, strict=True) if rank != self.rank})
        elif moved.sent:
            sent_to[next_in_ring(tuple(ranks), self.rank) if to is None else to] += moved.sent
