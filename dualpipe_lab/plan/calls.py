"""`Calls`: the communication calls of one rank, entered into a ledger without a process; `TimedCalls`: as seconds.

In: the arguments of a call, as the rank would make it.  Out: counts, bytes and peers by operation, as in the ledger of
a run: the formulas are the ledger's (`dualpipe_lab.launch.record.traffic`); or seconds by axis.
"""

from collections import defaultdict
from collections.abc import Sequence

from dualpipe_lab.launch.record import traffic
from dualpipe_lab.launch.record.ledger import RankLedger
from dualpipe_lab.launch.record.operation import next_in_ring
from dualpipe_lab.plan.fields import PlanFields
from dualpipe_lab.plan.hardware import Hardware, collective_seconds, exchange_seconds, message_seconds


class Calls:
    """The calls of one rank."""

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
        shards = [numel // len(ranks) * element_bytes] * len(ranks)
        moved = traffic.reduce_scatter(shards, ranks.index(self.rank))
        self._enter("reduce_scatter_single", moved, ranks, shards)  # GLOO has no ring for it

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


class TimedCalls(Calls):
    """The calls of one rank, entered as seconds by axis, `times` times each; receives run beside sends."""

    def __init__(self, plan: PlanFields, rank: int, hardware: Hardware) -> None:
        super().__init__(rank)
        self.hardware, self.size = hardware, plan.ranks_per_node or hardware.gpus_per_node
        here = plan.topology.at(rank)
        self.axes = {here.ranks(axis): axis for axis in ("ep", "cp", "tp") if getattr(plan, axis) > 1}
        self.groups = {axis: ranks for ranks, axis in self.axes.items()} | {"pp": here.ranks("pp")}
        self.default, self.times, self.seconds = "tp", 1.0, defaultdict[str, float](float)

    def send(self, peer: int, num_bytes: int) -> None:
        axis = "cp" if peer in self.groups.get("cp", ()) else "pp"
        first, last = self.groups[axis][0], self.groups[axis][-1]
        across = first // self.size != last // self.size
        self.seconds[axis] += self.times * message_seconds(num_bytes, across_nodes=across, hardware=self.hardware)

    def receive(self, peer: int, num_bytes: int) -> None: ...

    def all_reduce(self, ranks: Sequence[int], numel: int, element_bytes: int) -> None:
        self._collective(ranks, 2 * numel * element_bytes / len(ranks))

    def all_gather(self, ranks: Sequence[int], numel: int, element_bytes: int) -> None:
        self._collective(ranks, numel * element_bytes)

    def reduce_scatter(self, ranks: Sequence[int], numel: int, element_bytes: int) -> None:
        self._collective(ranks, numel * element_bytes / len(ranks))

    def all_to_all(self, ranks: Sequence[int], sends: Sequence[int], receives: Sequence[int]) -> None:
        num_bytes = sum(sends) * (len(ranks) - 1) / len(ranks)
        seconds = exchange_seconds(num_bytes, len(ranks), per_node=self._here(ranks), hardware=self.hardware)
        self._add(ranks, seconds)

    def _collective(self, ranks: Sequence[int], num_bytes: float) -> None:
        """Enter a collective in which a rank sends so many bytes for each other one."""
        here, others = self._here(ranks), len(ranks) - 1
        size, across, of = len(ranks), here < len(ranks), self.hardware
        self._add(ranks, collective_seconds(num_bytes * others, size, across_nodes=across, hardware=of, per_node=here))

    def _here(self, ranks: Sequence[int]) -> int:
        return sum(rank // self.size == self.rank // self.size for rank in ranks)

    def _add(self, ranks: Sequence[int], seconds: float) -> None:
        if len(ranks) > 1:
            self.seconds[self.axes.get(tuple(ranks), self.default)] += self.times * seconds
