"""The grid of ranks: the worked cases, what every grid must satisfy, and what is refused."""

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpipe_lab.topology import AXES, Topology

ORACLE = json.loads((Path(__file__).parents[1] / "oracles" / "collectives.json").read_text())["grids"]


@st.composite
def topologies(draw):
    names = draw(st.permutations(AXES))[: draw(st.integers(1, 5))]
    return Topology([(name, draw(st.integers(1, 3))) for name in names])


def test_sixteen_ranks_come_out_as_worked_by_hand():
    topology = Topology([("pp", 2), ("tp", 2), ("dp", 4)], edp=2, ranks_per_node=8)
    assert topology.groups("dp") == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    assert topology.groups("tp")[:3] == ((0, 4), (8, 12), (1, 5))
    assert topology.groups("pp")[:2] == ((0, 8), (1, 9))
    assert topology.groups("model")[:2] == ((0, 4, 8, 12), (1, 5, 9, 13))
    assert topology.groups("ep")[:2] == ((0, 1), (2, 3))
    assert topology.groups("edp")[:3] == ((0, 2), (1, 3), (4, 6))
    assert topology.groups("node") == (tuple(range(8)), tuple(range(8, 16)))


def test_groups_and_coordinates_equal_the_oracle():
    grids = [grid for grid in ORACLE if set(grid["sizes"]) <= set(AXES)]
    assert len(grids) >= 2
    for grid in grids:
        order = grid["order"]
        topology = Topology([(name, grid["sizes"][name]) for name in reversed(order)])
        for rank, place in enumerate(grid["coords"]):
            assert topology.coordinates(rank) == dict(zip(order, place, strict=True))
        for axis, groups in grid["groups"].items():
            assert sorted(topology.groups(axis)) == sorted(map(tuple, groups))


@given(topologies())
def test_every_axis_deals_out_the_ranks_once(topology):
    world = list(range(topology.world_size))
    for axis in (*topology.names, "model", "data"):
        groups = topology.groups(axis)
        assert sorted(rank for group in groups for rank in group) == world
        assert all(group == tuple(sorted(group)) for group in groups)
    for axis in topology.names:
        assert all(len(group) == topology.size(axis) for group in topology.groups(axis))
    assert topology.size("model") * topology.size("data") == topology.world_size


@given(topologies())
def test_groups_of_two_axes_meet_in_one_rank_at_most(topology):
    for first, second in [*combinations(topology.names, 2), ("model", "data")]:
        for one in topology.groups(first):
            assert all(len(set(one) & set(other)) <= 1 for other in topology.groups(second))


@given(topologies())
def test_a_group_differs_in_its_own_coordinate_alone(topology):
    for axis in topology.names:
        for group in topology.groups(axis):
            places = [topology.coordinates(rank) for rank in group]
            assert [place.pop(axis) for place in places] == list(range(len(group)))
            assert all(place == places[0] for place in places)
    for rank in range(topology.world_size):
        assert topology.rank_at(**topology.coordinates(rank)) == rank


@given(topologies())
def test_neighbours_form_one_ring(topology):
    for rank in range(topology.world_size):
        here = topology.at(rank)
        for axis in AXES:
            assert topology.at(here.next_rank(axis)).prev_rank(axis) == rank
            assert here.ranks(axis)[here.rank(axis)] == rank
            assert here.is_first(axis) == (here.rank(axis) == 0)
            assert here.is_last(axis) == (here.rank(axis) == here.size(axis) - 1)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_experts_and_their_copies_share_out_a_data_group(ep, edp, pp):
    topology = Topology([("pp", pp), ("dp", ep * edp)], edp=edp)
    assert (topology.size("ep"), topology.size("edp")) == (ep, edp)
    for group in topology.groups("dp"):
        inside = [part for part in topology.groups("ep") if part[0] in group]
        assert tuple(rank for part in inside for rank in part) == group
        assert [tuple(copies) for copies in zip(*inside, strict=True)] == [
            part for part in topology.groups("edp") if part[0] in group
        ]


def test_experts_may_span_other_axes_or_have_their_own():
    spread = Topology([("pp", 2), ("dp", 2), ("tp", 2)], edp=1, experts_over=("dp", "tp"))
    assert spread.groups("ep") == spread.groups("dp", "tp") == spread.groups("tp", "dp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    own = Topology([("dp", 2), ("ep", 2)])
    assert own.groups("ep") == ((0, 1), (2, 3))
    assert own.groups("edp") == ((0, 2), (1, 3))
    assert own.groups("data") == ((0, 1, 2, 3),)
    assert Topology([("ep", 2)]).groups("edp") == ((0,), (1,))


def test_a_data_group_on_several_nodes_has_shards_and_replicas():
    topology = Topology([("dp", 4), ("tp", 2)], ranks_per_node=4)
    assert topology.groups("shard") == ((0, 2), (4, 6), (1, 3), (5, 7))
    assert topology.groups("replica") == ((0, 4), (2, 6), (1, 5), (3, 7))
    with pytest.raises(ValueError, match=r"dp group \[0, 1, 2\] lies unevenly on nodes of 2"):
        Topology([("tp", 2), ("dp", 3)], ranks_per_node=2).groups("shard")


def test_what_does_not_fit_is_refused(subtests):
    for axes, options, message in [
        ([("pp", 2), ("dp", 3)], {"world_size": 8}, "pp 2 x dp 3 = 6 ranks, the world has 8"),
        ([("pp", 2), ("pp", 3)], {}, "at most once, and one at least, got pp 2 x pp 3 = 6"),
        ([("pp", 2), ("dp", 0)], {}, "every axis needs a whole size from 1, got pp 2 x dp 0 = 0"),
        ([("xp", 2)], {}, "each of pp, dp, cp, tp, ep at most once"),
        ([], {}, "one at least"),
        ([("dp", 2.0)], {}, "whole size"),
        ([("dp", 4)], {"edp": 3}, "edp must divide the 4 ranks of dp, got 3"),
        ([("dp", 4), ("ep", 2)], {"edp": 2}, "have an ep axis already"),
        ([("tp", 4)], {"edp": 2}, "have no dp axis; it has tp"),
        ([("dp", 4)], {"ranks_per_node": 3}, "ranks_per_node must divide the ranks, got 3"),
    ]:
        with subtests.test(axes=axes, options=options), pytest.raises(ValueError, match=message):
            Topology(axes, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.groups("cp"), "have no cp groups; it has dp, tp, model and data"),
        (lambda t: t.groups("ep"), "have no ep groups; give an ep axis or edp="),
        (lambda t: t.groups("node"), "have no node groups; give ranks_per_node="),
        (lambda t: t.groups("dp", "cp"), "have no cp axis"),
        (lambda t: t.at(4), "numbered 0 to 3, got 4"),
        (lambda t: t.rank_at(dp=2), "dp 2 does not exist in dp 2 x tp 2 = 4 ranks; it has dp 0 to 1"),
    ],
)
def test_unknown_groups_and_ranks_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(Topology([("dp", 2), ("tp", 2)]))


def test_a_description_makes_the_same_topology():
    topology = Topology([("pp", 2), ("dp", 4)], edp=2, ranks_per_node=4)
    again = Topology(**json.loads(json.dumps(topology.describe())))
    assert again == topology
    assert hash(again) == hash(topology)
    assert repr(topology.at(5)) == "<RankCoordinates of rank 5: pp 1, dp 1>"
    assert Topology([("pp", 2), ("dp", 4)]) != topology


def test_the_arithmetic_needs_no_torch():
    code = (
        "import sys; from dualpipe_lab.topology import Topology; from dualpipe_lab.viz import RankGrid; "
        "RankGrid(Topology([('dp', 2)]), 'dp'); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 0
