"""`TimedCalls`: the communication calls of one rank, entered as seconds by axis: those of `Calls`, over the links.

In: the arguments of a call, as the rank would make it.  Out: seconds of each axis.
"""

from collections import defaultdict
from collections.abc import Sequence

from dualpipe_lab.plan.calls import Calls
from dualpipe_lab.plan.hardware import Hardware, collective_seconds, exchange_seconds, message_seconds
from dualpipe_lab.plan.plan import Plan


class TimedCalls(Calls):
    """The calls of one rank, entered as seconds by axis instead of bytes."""

    def __init__(self, plan: Plan, rank: int, hardware: Hardware) -> None:
        super().__init__(rank)
        self.hardware, self.size = hardware, plan.ranks_per_node or hardware.gpus_per_node
        here = plan.topology.at(rank)
        self.axes = {here.ranks(axis): axis for axis in ("ep", "cp", "tp") if getattr(plan, axis) > 1}
        self.groups = {axis: ranks for ranks, axis in self.axes.items()} | {"pp": here.ranks("pp")}
        self.default, self.times, self.seconds = "tp", 1.0, defaultdict[str, float](float)

    def crosses(self, ranks: Sequence[int]) -> bool:
        return ranks[0] // self.size != ranks[-1] // self.size

    def send(self, peer: int, num_bytes: int) -> None:
        axis = "cp" if peer in self.groups.get("cp", ()) else "pp"
        across = self.crosses(self.groups[axis])
        seconds = message_seconds(num_bytes, across_nodes=across, hardware=self.hardware)
        self.seconds[axis] += self.times * seconds

    def receive(self, peer: int, num_bytes: int) -> None:
        """Enter nothing: it runs beside the send."""

    def all_reduce(self, ranks: Sequence[int], numel: int, element_bytes: int) -> None:
        self._collective(ranks, 2 * numel * element_bytes / len(ranks))

    def all_gather(self, ranks: Sequence[int], numel: int, element_bytes: int) -> None:
        self._collective(ranks, numel * element_bytes)

    def reduce_scatter(self, ranks: Sequence[int], numel: int, element_bytes: int) -> None:
        self._collective(ranks, numel * element_bytes / len(ranks))

    def all_to_all(self, ranks: Sequence[int], sends: Sequence[int], receives: Sequence[int]) -> None:
        if len(ranks) > 1:
            here = sum(rank // self.size == self.rank // self.size for rank in ranks)
            num_bytes = sum(sends) * (len(ranks) - 1) / len(ranks)
            seconds = exchange_seconds(num_bytes, len(ranks), per_node=here, hardware=self.hardware)
            self.seconds[self.axes.get(tuple(ranks), self.default)] += self.times * seconds

    def _collective(self, ranks: Sequence[int], num_bytes: float) -> None:
        """Enter a collective in which a rank sends so many bytes for each other one."""
        if len(ranks) < 2:
            return
        here = sum(rank // self.size == self.rank // self.size for rank in ranks)
        seconds = collective_seconds(
            num_bytes * (len(ranks) - 1), len(ranks), across_nodes=here < len(ranks), per_node=here,
            hardware=self.hardware,
        )  # fmt: skip
        self.seconds[self.axes.get(tuple(ranks), self.default)] += self.times * seconds
