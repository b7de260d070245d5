"""`RankCoordinates`: one rank's number, group and neighbours along every axis of a topology.

Chapter: book/dp/topology.  In: a topology, a rank.  Out: numbers of ranks.
`rank(axis)` counts within the group; all other results are global ranks, since peer messages are addressed to them.
Elsewhere: torch `DeviceMesh.get_coordinate`; Megatron `get_tensor_model_parallel_rank` and its siblings.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dualpipe_lab.topology.grid import Topology


class RankCoordinates:
    """The coordinates of one rank; every method takes an axis, or a derived kind of `Topology.groups`.

    An axis that the grid lacks has size 1: the rank is both its first and its last.

    >>> from dualpipe_lab.topology import Topology
    >>> here = Topology([("pp", 4), ("dp", 2)]).at(6)
    >>> here.rank("pp"), here.ranks("pp"), here.next_rank("pp"), here.is_last("pp")
    (3, (0, 2, 4, 6), 0, True)
    """

    def __init__(self, topology: "Topology", rank: int) -> None:
        self.topology, self.global_rank = topology, rank
        self.coordinates = topology.coordinates(rank)
        self._ranks: dict[tuple[str, ...], tuple[int, ...]] = {}

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Return the global ranks of this rank's group along an axis, or along several together, in group order."""
        if axes not in self._ranks:
            self._ranks[axes] = next(group for group in self._groups_along(axes) if self.global_rank in group)
        return self._ranks[axes]

    def _groups_along(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        present = tuple(axis for axis in axes if axis in self.topology.names or self.topology.size(axis) > 1)
        if not present:
            return tuple((rank,) for rank in range(self.topology.world_size))
        return self.topology.groups(*present)

    def rank(self, axis: str) -> int:
        """Return this rank's number within its group."""
        return self.ranks(axis).index(self.global_rank)

    def size(self, axis: str) -> int:
        """Return the number of ranks in this rank's group."""
        return len(self.ranks(axis))

    def next_rank(self, axis: str) -> int:
        """Return the global rank of the next member of the group; the first follows the last."""
        return self.ranks(axis)[(self.rank(axis) + 1) % self.size(axis)]

    def prev_rank(self, axis: str) -> int:
        """Return the global rank of the previous member of the group; the last precedes the first."""
        return self.ranks(axis)[self.rank(axis) - 1]

    def is_first(self, axis: str) -> bool:
        """Return whether this rank is number 0 of its group."""
        return self.rank(axis) == 0

    def is_last(self, axis: str) -> bool:
        """Return whether this rank has the highest number of its group."""
        return self.rank(axis) == self.size(axis) - 1

    def __repr__(self) -> str:
        along = ", ".join(f"{axis} {number}" for axis, number in self.coordinates.items())
        return f"<{type(self).__name__} of rank {self.global_rank}: {along}>"
