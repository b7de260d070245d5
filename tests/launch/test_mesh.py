"""A topology inside ranks: the groups really communicate, and torch's DeviceMesh agrees."""

import pytest
import torch

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.launch.mesh import GroupMesh, Mesh
from dualpipe_lab.topology import Topology

TOPOLOGY = Topology([("pp", 2), ("dp", 2), ("tp", 2)], edp=1, ranks_per_node=4)
KINDS = [("pp",), ("dp",), ("tp",), ("model",), ("ep",), ("edp",), ("node",)]
SEVERAL = [("dp", "tp"), ("cp",), ("dp", "cp"), ("pp", "cp", "tp")]  # the grid has no axis cp: it counts as one rank


def test_every_group_sums_over_exactly_its_ranks():
    def fn(rank, world_size):
        mesh = Mesh(TOPOLOGY)
        sums = {}
        for axes in KINDS + SEVERAL:
            x = torch.tensor([2**rank])
            comm.all_reduce(x, group=mesh.group(*axes))
            sums[axes] = int(x)
        again = mesh.group("model") is mesh.group("model")
        return sums, mesh.ranks("pp"), mesh.next_rank("pp"), again

    for rank, (sums, ranks, following, again) in enumerate(lab.launch(fn, 8)):
        here = TOPOLOGY.at(rank)
        pp, dp = rank // 4, rank // 2 % 2
        groups = {axes: here.ranks(*axes) for axes in KINDS}
        groups |= {("dp", "tp"): range(4 * pp, 4 * pp + 4), ("cp",): [rank], ("dp", "cp"): here.ranks("dp")}
        groups["pp", "cp", "tp"] = [2 * dp, 2 * dp + 1, 2 * dp + 4, 2 * dp + 5]
        assert sums == {axes: sum(2**member for member in group) for axes, group in groups.items()}
        assert (ranks, following, again) == (here.ranks("pp"), here.next_rank("pp"), True)


def test_the_device_mesh_is_the_same_grid_on_the_same_groups():
    def fn(rank, world_size):
        topology = Topology([("dp", 2), ("tp", 2)])
        mesh = Mesh(topology)
        theirs = mesh.device_mesh()
        flat = Mesh(Topology([("dp", 4)])).device_mesh()
        return (
            theirs.mesh.tolist(),
            theirs.mesh_dim_names,
            [torch.distributed.get_process_group_ranks(theirs.get_group(axis)) for axis in ("dp", "tp")],
            theirs.get_local_rank("tp"),
            flat.mesh.tolist(),
        )

    for rank, (grid, names, ranks, place, flat) in enumerate(lab.launch(fn, 4)):
        here = Topology([("dp", 2), ("tp", 2)]).at(rank)
        assert grid == [[0, 1], [2, 3]]
        assert names == ("dp", "tp")
        assert ranks == [list(here.ranks("dp")), list(here.ranks("tp"))]
        assert place == here.rank("tp")
        assert flat == [0, 1, 2, 3]


def test_axes_of_one_rank_and_a_world_of_another_size():
    def fn(rank, world_size):
        mesh = Mesh(Topology([("pp", 1), ("dp", 2)]))
        x = torch.ones(1)
        comm.all_reduce(x, group=mesh.group("pp"))
        alone = mesh.group("cp")  # the grid has no such axis: every rank is alone in it
        comm.all_reduce(x, group=alone)
        return float(x)

    assert lab.launch(fn, 2) == [1.0, 1.0]
    with pytest.raises(lab.RankError, match="dp 4 = 4 ranks, the world has 2"):
        lab.launch(lambda rank, world_size: Mesh(Topology([("dp", 4)])), 2)


def test_a_group_of_members_only_leaves_the_others_alone():
    """Ranks 0 and 1 make two groups, ranks 2 and 3 one, and rank 4 none: nobody waits for anybody else."""

    def fn(rank, world_size):
        sums = []
        for _ in range({0: 2, 1: 1, 2: 0}[rank // 2]):
            group = comm.new_group([rank // 2 * 2, rank // 2 * 2 + 1], members_only=True)
            x = torch.tensor([2**rank])
            comm.all_reduce(x, group=group)
            sums.append(int(x))
        return sums

    assert lab.launch(fn, 5) == [[3, 3], [3, 3], [12], [12], []]


def test_a_group_is_a_mesh_of_its_global_ranks_with_one_axis():
    def fn(rank, world_size):
        group = Mesh(Topology([("dp", 2), ("tp", 2)])).group("dp")
        mesh, world, x = GroupMesh(group), GroupMesh(), torch.tensor([2**rank])
        comm.all_reduce(x, group=mesh.group("dp", "cp"))
        with pytest.raises(ValueError, match="have no groups along"):
            mesh.group("tp")
        return int(x), mesh.ranks("dp"), mesh.rank("dp"), mesh.ranks("tp"), mesh.everyone is group, world.ranks("dp")

    for rank, found in enumerate(lab.launch(fn, 4)):
        first = rank % 2
        assert found == (2**first + 2 ** (first + 2), (first, first + 2), rank // 2, (rank,), True, (0, 1, 2, 3))
