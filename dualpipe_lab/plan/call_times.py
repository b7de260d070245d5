"""`CallTimes`: the seconds of the calls that a stage makes, of the same calls whose bytes `Calls` counts.

In: a cluster, a plan, calls.  Out: seconds by axis.
  group         n ranks, of which g share a node; a ring through nodes leaves each of them on g links at once, so its
                rate is that of `between` times g, and never above that of `inside`
  all-reduce    2 (n - 1) / n of the bytes at that rate, and a gather or a scatter half of it
  all-to-all    the bytes for this node at the rate of `inside`, at the same time those for others at `between`;
                node by node, all bytes are spread inside of nodes, and fewer go between them
  message       its bytes, on `inside` where the neighbours of the axis share a node
  latency       once for each of the ceil(log2 n) rounds of a collective, twice for an all-reduce
Assumed: calls do not disturb each other, and networks are not oversubscribed.
Elsewhere: calculon's `Network`; SimuMax's `compute_net_op_time`.
"""

from collections.abc import Sequence
from math import ceil, log2
from typing import NamedTuple

from dualpipe_lab.plan.calls import Calls
from dualpipe_lab.plan.cluster import Cluster
from dualpipe_lab.plan.fields import PlanFields


class Group(NamedTuple):
    """A group of ranks: how many, and how many of them share a node.

    >>> Group.along(PlanFields(dp=4, tp=4, ranks_per_node=8), "dp", ranks_per_node=8)
    Group(axis='dp', size=4, per_node=2)
    """

    axis: str
    size: int
    per_node: int

    @classmethod
    def along(cls, plan: PlanFields, axis: str, ranks_per_node: int, over: Sequence[str] = ()) -> "Group":
        """Return the groups along an axis, or along several that are `over`.

        Experts within the data ranks: `ep` are the innermost of those, `edp` the others.
        """
        if plan.experts_in_data and axis in ("ep", "edp"):
            data = cls.along(plan, "data", ranks_per_node, ("dp", "cp"))
            here = min(plan.ep, data.per_node)
            return cls("ep", plan.ep, here) if axis == "ep" else cls(
                "edp", data.size // plan.ep, max(1, data.per_node // plan.ep)
            )  # fmt: skip
        size = per_node = stride = 1
        for name in reversed(plan.order):
            length = plan.sizes[name]
            if name in (over or (axis,)):
                size *= length
                per_node *= min(length, max(1, ranks_per_node // stride))
            stride *= length
        return cls(axis, size, per_node)

    @property
    def crosses(self) -> bool:
        """Whether it has ranks on several nodes."""
        return self.per_node < self.size


class Links:
    """The rates of a cluster's links, for groups."""

    def __init__(self, cluster: Cluster) -> None:
        self.inside, self.between = cluster.inside, cluster.between

    def collective(self, group: Group, num_bytes: float, passes: int = 1) -> float:
        """Return the seconds in which (n - 1) / n of the bytes leave every rank, so many times."""
        if group.size == 1:
            return 0.0
        rate = self.inside.rate(num_bytes)
        if group.crosses:
            rate = min(rate, group.per_node * self.between.rate(num_bytes))
        latency = self.between.latency if group.crosses else self.inside.latency
        rounds = ceil(log2(group.size))
        return passes * (num_bytes * (group.size - 1) / group.size / rate + rounds * latency)

    def all_to_all(self, group: Group, num_bytes: float) -> float:
        """Return the seconds of an exchange in which each rank has so many bytes for all ranks together."""
        if group.size == 1:
            return 0.0
        each = num_bytes / group.size
        near = each * (group.per_node - 1) / self.inside.rate(each)
        if not group.crosses:
            return near + self.inside.latency
        far = each * (group.size - group.per_node) / self.between.rate(each)
        return max(near + self.inside.latency, far + self.between.latency)

    def all_to_all_by_node(self, group: Group, num_bytes: float, crossing_bytes: float) -> float:
        """Return the seconds of an exchange in which a row goes once to each node, and from there to its ranks.

        Args:
            group: that crosses nodes.
            num_bytes: that each rank has for all ranks together, as in `all_to_all`.
            crossing_bytes: of those, what leaves the node.
        """
        spread = num_bytes * (group.per_node - 1) / group.per_node
        near = spread / self.inside.rate(num_bytes / group.per_node)
        num_others = ceil(group.size / group.per_node) - 1
        far = crossing_bytes / self.between.rate(crossing_bytes / num_others)
        return max(near + self.inside.latency, far + self.between.latency)

    def message(self, group: Group, num_bytes: float) -> tuple[float, float]:
        """Return the seconds for which a message to a neighbour takes the slowest link, and its latency."""
        link = self.between if group.crosses else self.inside
        return num_bytes / link.rate(num_bytes), link.latency


class _Ranks(tuple[int, ...]):
    """The ranks of a group, which know their axis."""

    axis: str


class CallTimes(Calls):
    """Adds up the seconds of calls, by axis, instead of their bytes.

    Attributes:
        links: of the cluster.
        groups: by axis.
        ranks: by axis, what to name in a call.
        seconds: by axis.

    Args:
        links: of the cluster.
        groups: by axis; calls are made with the tuples of `ranks`.
    """

    def __init__(self, links: Links, groups: dict[str, Group]) -> None:
        super().__init__(0)
        self.links, self.groups = links, groups
        self.seconds: dict[str, float] = dict.fromkeys(groups, 0.0)
        self.ranks = {axis: _Ranks(range(group.size)) for axis, group in groups.items()}
        for axis, ranks in self.ranks.items():
            ranks.axis = axis

    def all_reduce(self, ranks: Sequence[int], numel: int, element_bytes: int) -> None:
        """Add the seconds of a sum."""
        self._collective(ranks, numel * element_bytes, 2)

    def all_gather(self, ranks: Sequence[int], numel: int, element_bytes: int) -> None:
        """Add the seconds of a gather of shards of so many elements."""
        self._collective(ranks, numel * element_bytes * len(ranks), 1)

    def reduce_scatter(self, ranks: Sequence[int], numel: int, element_bytes: int) -> None:
        """Add the seconds of a sum whose shards stay apart."""
        self._collective(ranks, numel * element_bytes, 1)

    def all_to_all(self, ranks: Sequence[int], sends: Sequence[int], receives: Sequence[int]) -> None:
        """Add the seconds of an exchange."""
        self.seconds["ep"] += self.links.all_to_all(self.groups["ep"], sum(sends))

    def all_to_all_by_node(self, num_bytes: float, crossing_bytes: float) -> None:
        """Add the seconds of an exchange node by node."""
        self.seconds["ep"] += self.links.all_to_all_by_node(self.groups["ep"], num_bytes, crossing_bytes)

    def send(self, peer: int, num_bytes: int) -> None:
        """Add the seconds of a hop on the ring of cp."""
        self.hop(num_bytes, 1)

    def hop(self, num_bytes: int, count: int) -> None:
        """Add the seconds of hops of so many bytes; of none there are none."""
        if num_bytes:
            self.seconds["cp"] += count * sum(self.links.message(self.groups["cp"], num_bytes))

    def receive(self, peer: int, num_bytes: int) -> None:
        """Nothing: a hop is counted where it is sent."""

    def _collective(self, ranks: Sequence[int], num_bytes: int, passes: int) -> None:
        axis = (
            ranks.axis if isinstance(ranks, _Ranks) else "tp"
        )  # a part of tp: the ranks with copies of the same key heads
        group = self.groups[axis]
        if len(ranks) < group.size:
            group = Group(axis, len(ranks), min(group.per_node, len(ranks)))
        self.seconds[axis] += self.links.collective(group, num_bytes, passes)
