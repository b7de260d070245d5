"""The grid of ranks: the worked cases, what every grid must satisfy, and what is refused."""

import json
from itertools import combinations, product
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
def test_groups_deal_out_the_ranks_once_and_meet_in_one_rank_at_most(topology):
    world, names = list(range(topology.world_size)), topology.names
    for axis in (*names, "model", "data"):
        groups = topology.groups(axis)
        assert sorted(rank for group in groups for rank in group) == world
        assert all(group == tuple(sorted(group)) for group in groups)
    assert topology.size("model") * topology.size("data") == topology.world_size
    for first, second in [*combinations(names, 2), ("model", "data")]:
        for one, other in product(topology.groups(first), topology.groups(second)):
            assert len(set(one) & set(other)) <= 1


@given(topologies())
def test_a_group_differs_in_its_own_coordinate_alone_and_is_a_ring(topology):
    for axis in topology.names:
        for group in topology.groups(axis):
            places = [topology.coordinates(rank) for rank in group]
            assert [place.pop(axis) for place in places] == list(range(topology.size(axis)))
            assert all(place == places[0] for place in places)
    for rank in range(topology.world_size):
        here = topology.at(rank)
        assert topology.rank_at(**topology.coordinates(rank)) == rank
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


GRID = Topology([("dp", 2), ("tp", 2)])
REFUSED = [
    (lambda: Topology([("pp", 2), ("dp", 3)], world_size=8), "pp 2 x dp 3 = 6 ranks, the world has 8"),
    (lambda: Topology([("pp", 2), ("pp", 3)]), "at most once, and one at least, got pp 2 x pp 3 = 6"),
    (lambda: Topology([("pp", 2), ("dp", 0)]), "every axis needs a whole size from 1, got pp 2 x dp 0 = 0"),
    (lambda: Topology([("xp", 2)]), "each of pp, dp, cp, tp, ep at most once"),
    (lambda: Topology([]), "one at least"),
    (lambda: Topology([("dp", 2.0)]), "whole size"),
    (lambda: Topology([("dp", 4)], edp=3), "edp must divide the 4 ranks of dp, got 3"),
    (lambda: Topology([("dp", 4), ("ep", 2)], edp=2), "have an ep axis already"),
    (lambda: Topology([("tp", 4)], edp=2), "have no dp axis; it has tp"),
    (lambda: Topology([("dp", 4)], ranks_per_node=3), "ranks_per_node must divide the ranks, got 3"),
    (
        lambda: Topology([("tp", 2), ("dp", 3)], ranks_per_node=2).groups("shard"),
        r"\[0, 1, 2\] lies unevenly on nodes of 2",
    ),
    (lambda: GRID.groups("cp"), "have no cp groups; it has dp, tp, model and data"),
    (lambda: GRID.groups("ep"), "have no ep groups; give an ep axis or edp="),
    (lambda: GRID.groups("node"), "have no node groups; give ranks_per_node="),
    (lambda: GRID.groups("dp", "cp"), "have no cp axis"),
    (lambda: GRID.at(4), "numbered 0 to 3, got 4"),
    (lambda: GRID.rank_at(dp=2), "dp 2 does not exist in dp 2 x tp 2 = 4 ranks; it has dp 0 to 1"),
]


def test_what_does_not_fit_is_refused(subtests):
    for call, message in REFUSED:
        with subtests.test(message=message), pytest.raises(ValueError, match=message):
            call()


def test_a_description_makes_the_same_topology():
    topology = Topology([("pp", 2), ("dp", 4)], edp=2, ranks_per_node=4)
    again = Topology(**json.loads(json.dumps(topology.describe())))
    assert again == topology
    assert hash(again) == hash(topology)
    assert repr(topology.at(5)) == "<RankCoordinates of rank 5: pp 1, dp 1>"
    assert Topology([("pp", 2), ("dp", 4)]) != topology
