"""`RankCoordinates`: a topology as one rank sees it, by axis.

Chapter: book/dp/topology.  In: a topology, a rank.  Out: the rank's number, neighbours and partners along each axis.
Everything is a global rank but `rank(axis)`, which counts within the group: peer messages take global ranks.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dualpipe_lab.topology.grid import Topology


class RankCoordinates:
    """One rank's place; every method takes an axis or a derived kind of `Topology.groups`.

    An axis that the grid lacks is one of size 1: the rank is alone in it, its first and its last.

    >>> from dualpipe_lab.topology import Topology
    >>> seat = Topology([("pp", 4), ("dp", 2)]).at(6)
    >>> seat.rank("pp"), seat.ranks("pp"), seat.next_rank("pp"), seat.is_last("pp")
    (3, (0, 2, 4, 6), 0, True)
    """

    def __init__(self, topology: "Topology", rank: int) -> None:
        self.topology, self.global_rank = topology, rank
        self.coordinates = topology.coordinates(rank)
        self._ranks: dict[tuple[str, ...], tuple[int, ...]] = {}

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Global ranks of this rank's group along an axis, or along several together, in group order."""
        if axes not in self._ranks:
            self._ranks[axes] = next(group for group in self._groups_along(axes) if self.global_rank in group)
        return self._ranks[axes]

    def _groups_along(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        present = tuple(axis for axis in axes if axis in self.topology.names or self.topology.size(axis) > 1)
        if not present:
            return tuple((rank,) for rank in range(self.topology.world_size))
        return self.topology.groups(*present)

    def rank(self, axis: str) -> int:
        """This rank's number within its group."""
        return self.ranks(axis).index(self.global_rank)

    def size(self, axis: str) -> int:
        """Number of ranks in its group."""
        return len(self.ranks(axis))

    def next_rank(self, axis: str) -> int:
        """Global rank of the next member; after the last comes the first."""
        return self.ranks(axis)[(self.rank(axis) + 1) % self.size(axis)]

    def prev_rank(self, axis: str) -> int:
        """Global rank of the member before; before the first comes the last."""
        return self.ranks(axis)[self.rank(axis) - 1]

    def is_first(self, axis: str) -> bool:
        """Whether this rank is number 0 of its group."""
        return self.rank(axis) == 0

    def is_last(self, axis: str) -> bool:
        """Whether this rank has the highest number of its group."""
        return self.rank(axis) == self.size(axis) - 1

    def __repr__(self) -> str:
        places = ", ".join(f"{axis} {place}" for axis, place in self.coordinates.items())
        return f"<{type(self).__name__} of rank {self.global_rank}: {places}>"
