"""`Topology`: the grid of ranks, and the groups in which ranks communicate; `RankCoordinates`: the same for one rank.

Chapter: book/dp/topology.  In: axes outermost first, each with its size.  Out: groups, as tuples of ranks.
  rank               ((c_1 * n_2 + c_2) * n_3 + c_3) ...       mixed radix; the last axis is contiguous
  groups of an axis  world / size of the axis, each with `size` ranks that differ in that coordinate alone
Ranks that differ along `dp`, or along `ep` where it is an axis of the grid, work on different data.
Elsewhere: torch `init_device_mesh`, `DeviceMesh.get_coordinate`; Megatron `parallel_state`, whose order tp-cp-ep-dp-pp
lists the fastest axis first.
Source: Narayanan et al. 2021 (arXiv 2104.04473), section 3.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import groupby, product
from math import prod
from typing import TypeAlias

AXES = ("pp", "dp", "cp", "tp", "ep")
SHOWN = 16  # groups of a kind that are printed
_DATA = ("dp", "ep")  # ranks that differ along these see different data
Groups: TypeAlias = tuple[tuple[int, ...], ...]


class Topology:
    """The ranks of a world, arranged in a grid with named axes.

    Args:
        axes: pairs of a name (of `pp dp cp tp ep`) and a size, outermost first; the last one is contiguous in rank.
        edp: replicas of each expert, where experts are sharded within data groups and not along an axis `ep`.
        experts_over: the axes whose ranks together shard the experts (default: `dp`); needs `edp`.
        ranks_per_node: consecutive ranks that share a machine.
        world_size: the product that the sizes must have, if it is known.

    Raises:
        ValueError: an unknown or repeated axis, a size below 1, a product that is not the world size, or an `edp` or
            `ranks_per_node` that does not divide what it should.

    >>> topology = Topology([("pp", 2), ("dp", 2), ("tp", 2)])
    >>> topology.groups("tp")
    ((0, 1), (2, 3), (4, 5), (6, 7))
    >>> topology.groups("model")
    ((0, 1, 4, 5), (2, 3, 6, 7))
    """

    def __init__(
        self,
        axes: Sequence[tuple[str, int]],
        *,
        edp: int | None = None,
        experts_over: Sequence[str] = ("dp",),
        ranks_per_node: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.axes = tuple((name, size) for name, size in axes)
        self.names, self.sizes = tuple(name for name, _ in self.axes), tuple(size for _, size in self.axes)
        if not self.axes or len(set(self.names)) != len(self.names) or not set(self.names) <= set(AXES):
            names = ", ".join(AXES)
            raise ValueError(f"a topology has each of {names} at most once, and one at least, got {self.shape}")
        if any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in self.sizes):
            raise ValueError(
                f"every axis needs a whole size from 1, got {self.shape}; leave out an axis that is not used"
            )
        self.world_size = prod(self.sizes)
        self._along: dict[str, range] = {}
        for index, (name, size) in enumerate(self.axes):  # the ranks that differ from rank 0 along one axis alone
            step = prod(self.sizes[index + 1 :])
            self._along[name] = range(0, step * size, step)
        self._found: dict[tuple[str, ...], Groups] = {}
        self.edp, self.experts_over, self.ranks_per_node = edp, tuple(experts_over), ranks_per_node
        if world_size is not None and world_size != self.world_size:
            raise ValueError(f"{self.shape} ranks, the world has {world_size}; the sizes must multiply to {world_size}")
        if edp is not None:
            self._check_experts(edp)
        if ranks_per_node is not None and (ranks_per_node < 1 or self.world_size % ranks_per_node):
            raise ValueError(f"ranks_per_node must divide the ranks, got {ranks_per_node} for {self.shape}")

    def groups(self, *axes: str) -> Groups:
        """Return all groups of an axis, of several axes taken together, or of a derived kind.

        Derived kinds: `model` (ranks with the same data), `data` (ranks with the same weights and other data), `ep` and
        `edp` (within each data group: consecutive ranks, ranks at equal distances), `node` (consecutive ranks), and of
        each `dp` group `shard` (its ranks on one node) and `replica` (one of its ranks per node).

        Raises:
            ValueError: the topology has no such axis or group.
        """
        if axes not in self._found:
            self._found[axes] = self._derived(axes[0]) if len(axes) == 1 else self._combine(axes)
        return self._found[axes]

    @cached_property
    def _single(self) -> Groups:
        return tuple((rank,) for rank in range(self.world_size))

    def along(self, *axes: str) -> Groups:
        """Return the groups of those axes or derived kinds that the grid has; single ranks if it has none of them."""
        present = tuple(axis for axis in axes if axis in self.names or self.size(axis) > 1)
        return self.groups(*present) if present else self._single

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's number along each axis.

        >>> Topology([("pp", 2), ("dp", 2), ("tp", 2)]).coordinates(6)
        {'pp': 1, 'dp': 1, 'tp': 0}
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"{self.shape} ranks are numbered 0 to {self.world_size - 1}, got {rank}")
        return {name: rank // self._along[name].step % size for name, size in self.axes}

    def rank_at(self, **coordinates: int) -> int:
        """Return the rank at these coordinates; an axis that is not named counts as 0.

        >>> Topology([("pp", 2), ("dp", 2), ("tp", 2)]).rank_at(pp=1, dp=1)
        6
        """
        for axis, number in coordinates.items():
            self._check_known(axis)
            if not 0 <= number < len(self._along[axis]):
                last = len(self._along[axis]) - 1
                raise ValueError(f"{axis} {number} does not exist in {self.shape} ranks; it has {axis} 0 to {last}")
        return sum(self._along[axis][number] for axis, number in coordinates.items())

    def size(self, axis: str) -> int:
        """Return the number of ranks per group of an axis or derived kind; 1 for an axis that is not in the grid."""
        if axis in AXES and axis not in self.names and not (axis == "ep" and self.edp):
            return 1
        return len(self.groups(axis)[0])

    def parts_by_node(self, *axes: str) -> tuple[Groups, ...]:
        """Return, for each group along the axes that the grid has, its ranks on each node, equally many on all of them.

        Raises:
            ValueError: the topology has no `ranks_per_node`, or a group lies unevenly on the nodes.

        >>> Topology([("dp", 4), ("tp", 2)], ranks_per_node=4).parts_by_node("dp")
        (((0, 2), (4, 6)), ((1, 3), (5, 7)))
        """
        size = self.ranks_per_node
        if size is None:
            raise ValueError(f"{self.shape} ranks have no nodes; give ranks_per_node=")
        found = []
        for group in self.along(*axes):
            parts = tuple(tuple(part) for _, part in groupby(group, lambda rank: rank // size))
            if len({len(part) for part in parts}) != 1:
                raise ValueError(
                    f"{' x '.join(axes)} group {list(group)} lies unevenly on nodes of {size} ranks: {list(parts)}; "
                    "shard over all copies (hybrid=False), or use another ranks_per_node"
                )
            found.append(parts)
        return tuple(found)

    def at(self, rank: int) -> "RankCoordinates":
        """Return one rank's coordinates: its number, group and neighbours along every axis."""
        return RankCoordinates(self, rank)

    @property
    def shape(self) -> str:
        """The axes with their sizes, as one line: `pp 2 x dp 4 = 8`."""
        return f"{' x '.join(f'{name} {size}' for name, size in self.axes)} = {prod(self.sizes)}"

    def __str__(self) -> str:
        """List the groups of every axis, and of experts and nodes.

        >>> print(Topology([("pp", 2), ("dp", 2)]))
        pp 2 x dp 2 = 4 ranks
        group pp, ranks: [0, 2]
        group pp, ranks: [1, 3]
        group dp, ranks: [0, 1]
        group dp, ranks: [2, 3]
        """
        kinds = [*self.names, *(["ep", "edp"] if self.edp else []), *(["node"] if self.ranks_per_node else [])]
        lines = [f"{self.shape} ranks"]
        for kind in kinds:
            groups = self.groups(kind)
            lines += [f"group {kind}, ranks: {list(group)}" for group in groups[:SHOWN]]
            lines += [f"group {kind}: {len(groups) - SHOWN} more"] if len(groups) > SHOWN else []
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Topology {self.shape} ranks>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topology) and self.describe() == other.describe()

    def __hash__(self) -> int:
        return hash(self.axes)

    def describe(self) -> dict[str, object]:
        """Return the constructor's arguments as JSON values."""
        return {
            "axes": [list(axis) for axis in self.axes],
            "edp": self.edp,
            "experts_over": list(self.experts_over),
            "ranks_per_node": self.ranks_per_node,
        }

    def _combine(self, axes: Sequence[str], start: int = 0) -> Groups:
        """Return the groups along `axes`, one for each combination along the others; of those, `start` is slowest."""
        for axis in axes:
            self._check_known(axis)
        inside = self._offsets([name for name in self.names if name in axes])
        others = [name for name in (*self.names[start:], *self.names[:start]) if name not in axes]
        return tuple(tuple(first + offset for offset in inside) for first in self._offsets(others))

    def _offsets(self, axes: Sequence[str]) -> list[int]:
        """Return the distance from rank 0 of every combination along `axes`; the first axis changes slowest."""
        return list(map(sum, product(*(self._along[axis] for axis in axes))))

    def _derived(self, kind: str) -> Groups:
        if kind in self.names:  # the axes behind it come first, so that a list of groups starts with neighbours
            return self._combine([kind], self.names.index(kind))
        if kind in ("model", "data"):
            return self._combine([name for name in self.names if (name in _DATA) == (kind == "data")])
        if kind == "node" and self.ranks_per_node:
            return _slices(range(self.world_size), self.ranks_per_node)
        if kind in ("shard", "replica") and self.ranks_per_node:
            parts = self.parts_by_node("dp")
            return tuple(ranks for each in parts for ranks in (each if kind == "shard" else zip(*each, strict=True)))
        if kind in ("ep", "edp") and self.edp:
            groups = self.groups(*self.experts_over)
            size = len(groups[0]) // self.edp
            if kind == "ep":
                return tuple(part for group in groups for part in _slices(group, size))
            return tuple(group[first::size] for group in groups for first in range(size))
        if kind == "edp" and "ep" in self.names:
            return self.along("dp")
        needs = dict.fromkeys(("node", "shard", "replica"), "ranks_per_node=")
        needs |= dict.fromkeys(("ep", "edp"), "an ep axis or edp=")
        remedy = f"; give {needs[kind]}" if kind in needs else f"; it has {', '.join(self.names)}, model and data"
        raise ValueError(f"{self.shape} ranks have no {kind} groups{remedy}")

    def _check_experts(self, edp: int) -> None:
        if "ep" in self.names:
            raise ValueError(f"{self.shape} ranks have an ep axis already; leave out edp={edp}, or the axis")
        for axis in self.experts_over:
            self._check_known(axis)
        ranks = prod(len(self._along[axis]) for axis in self.experts_over)
        if edp < 1 or ranks % edp:
            over = " x ".join(self.experts_over)
            raise ValueError(f"edp must divide the {ranks} ranks of {over}, got {edp} in {self.shape} ranks")

    def _check_known(self, axis: str) -> None:
        if axis not in self.names:
            raise ValueError(f"{self.shape} ranks have no {axis} axis; it has {', '.join(self.names)}")


class RankCoordinates:
    """The coordinates of one rank; every method takes an axis, or a derived kind of `Topology.groups`.

    An axis that the grid lacks has size 1: the rank is its first and its last.

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

    def _groups_along(self, axes: tuple[str, ...]) -> Groups:
        return self.topology.along(*axes)

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


def _slices(ranks: Sequence[int], size: int) -> Groups:
    return tuple(tuple(ranks[start : start + size]) for start in range(0, len(ranks), size))
