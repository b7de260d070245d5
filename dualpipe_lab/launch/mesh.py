"""`Mesh`: the topology on one rank, with a process group per axis; `GroupMesh`: one group as a mesh of one axis.

Chapter: book/dp/topology.  In: a topology of the world's size.  Out: coordinates, process groups, a `DeviceMesh`.
Torch makes a group only if every rank of the world takes part.  The first call of `group(axis)` therefore makes all
groups along the axis, and every rank must call it, in the same order of axes.  Meshes of one run share their groups:
three threads of GLOO serve each, and look around a hundred times per second.
Elsewhere: torch `DeviceMesh.get_group`; Megatron `get_tensor_model_parallel_group`.
"""

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group, members
from dualpipe_lab.launch.context import rank_context
from dualpipe_lab.topology import RankCoordinates, Topology


class Mesh(RankCoordinates):
    """This rank's coordinates in a topology, and its process groups.

    Attributes:
        everyone: all ranks of the mesh; None for the world.

    Raises:
        ValueError: the topology has another number of ranks than the world.
    """

    everyone: Group | None = None

    def __init__(self, topology: Topology) -> None:
        world_size = rank_context().world_size
        if topology.world_size != world_size:
            raise ValueError(
                f"{topology.shape} ranks, the world has {world_size}; the sizes must multiply to {world_size}"
            )
        super().__init__(topology, rank_context().rank)
        self._groups: dict[tuple[int, ...], Group] = {}  # by their ranks: axes may share a group
        self._made = rank_context().groups

    def group(self, *axes: str) -> Group:
        """Process group of this rank along one axis or several: gradients are reduced over `group("dp", "cp")`.

        The first call for an axis involves every rank of the world, unless another mesh has made these groups.

        Raises:
            ValueError: the topology has no such axis.
        """
        mine = self.ranks(*axes)
        if mine not in self._groups:
            every = self._groups_along(axes)  # the same on all ranks, so all make groups or none
            if every not in self._made:
                made = {ranks: comm.new_group(ranks) for ranks in every}
                self._made[every] = made[mine]
            self._groups[mine] = self._made[every]
        return self._groups[mine]

    def device_mesh(self, device: str | None = None) -> DeviceMesh:
        """Torch's `DeviceMesh` of the same grid and process groups, for tensors of the rank's kind of device."""
        device = device or rank_context().device.type
        grid = torch.arange(self.topology.world_size).view(self.topology.sizes)
        groups = [self.group(axis) for axis in self.topology.names]
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], device, mesh_dim_names=self.topology.names)
        return DeviceMesh.from_group(groups, device, mesh=grid, mesh_dim_names=self.topology.names)


class GroupMesh(Mesh):
    """The ranks of one group, which work on different data, as a mesh with the axis dp alone; making it sends nothing.

    Args:
        group: the ranks (default: the world).
    """

    def __init__(self, group: Group | None = None) -> None:
        self.everyone, self._members = group, members(group)
        RankCoordinates.__init__(self, Topology([("dp", len(self._members))]), comm.get_rank(group))
        self.global_rank = rank_context().rank

    def group(self, *axes: str) -> Group:
        """The group itself: no other axis has more than one rank."""
        if self.ranks(*axes) != self._members:
            raise ValueError(f"the ranks of one group have no groups along {axes}; give the Mesh of all axes instead")
        return dist.group.WORLD if self.everyone is None else self.everyone

    def _groups_along(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self._members[number] for number in ranks) for ranks in super()._groups_along(axes))
