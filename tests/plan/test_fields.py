"""Fields of a plan: ranks, grid, program, text; what has no meaning is refused."""

import json
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dualpipe_lab as lab
from dualpipe_lab.topology import AXES

sizes = st.integers(1, 4)
plans = st.builds(
    lab.Plan,
    pp=sizes,
    dp=sizes,
    cp=sizes,
    tp=sizes,
    ep=sizes,
    num_microbatches=st.integers(1, 8),
    schedule=st.sampled_from(lab.schedules.names()),
    zero=st.integers(0, 3),
    sequence_parallel=st.booleans(),
    layout=st.sampled_from(("contiguous", "zigzag", "striped")),
    precision=st.sampled_from(lab.plan.PRECISIONS),
    layers=st.none() | st.lists(sizes, min_size=1, max_size=3).map(tuple),
    order=st.permutations(AXES).map(tuple),
    mtp=st.none() | st.floats(0, 2, exclude_min=True),
)


@given(plans)
def test_a_description_goes_through_json_and_back(plan):
    assert lab.Plan(**json.loads(json.dumps(plan.describe()))) == plan


@given(plans)
def test_the_grid_has_every_axis_with_several_ranks_in_the_plan_s_order(plan):
    topology = plan.topology
    assert topology.world_size == plan.world_size == plan.pp * plan.dp * plan.cp * plan.tp * plan.ep
    assert all(topology.size(axis) == getattr(plan, axis) for axis in AXES)
    if plan.world_size > 1:
        assert topology.names == tuple(axis for axis in plan.order if getattr(plan, axis) > 1)
    assert plan.data_size == plan.dp * plan.ep
    assert plan.num_copies == topology.size("data") * plan.cp


def test_experts_within_the_data_ranks_are_no_axis():
    plan = lab.Plan(dp=2, cp=2, ep=2, experts_in_data=True)
    assert (plan.world_size, plan.data_size, plan.num_copies) == (4, 2, 4)
    assert plan.topology.groups("ep") == ((0, 1), (2, 3))
    assert plan.topology.groups("edp") == ((0, 2), (1, 3))
    with pytest.raises(ValueError, match=r"ep must divide them, got ep 3 and dp 2 x cp 2 = 4"):
        _ = replace(plan, ep=3).topology


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (lab.Plan(), "dp 1 = 1 rank, float32"),
        (lab.Plan(tp=2, num_microbatches=4), "tp 2 = 2 ranks, m 4, float32"),
        (lab.Plan(tp=2, loss_chunk=512), "tp 2 = 2 ranks, loss in chunks of 512 tokens, float32"),
        (lab.Plan(tp=2, mtp=0.3), "tp 2 = 2 ranks, a second token of weight 0.3, float32"),
        (
            lab.Plan(pp=2, dp=2, tp=2, num_microbatches=8, zero=1, sequence_parallel=True),
            "pp 2 (1f1b, m 8) x dp 2 (ZeRO-1) x tp 2 (sequence parallel) = 8 ranks, float32",
        ),
        (lab.Plan(cp=2, zero=2, precision="float64"), "cp 2 (zigzag) = 2 ranks, ZeRO-2, float64"),
        (
            lab.Plan(dp=4, ep=2, experts_in_data=True, zero=3, hybrid=True, ranks_per_node=2, recompute=True),
            "dp 4 (hybrid ZeRO-3) = 4 ranks, ep 2 within the data ranks, 2 ranks per node, recompute, float32",
        ),
        (
            lab.Plan(pp=2, ep=2, schedule="DualPipe V", num_microbatches=4, overlap=True, layers=(1, 1, 1, 2)),
            "pp 2 (dualpipev, m 4, layers 1 1 1 2) x ep 2 = 4 ranks, overlapped experts, float32",
        ),
        (
            lab.Plan(pp=2, schedule="interleaved", chunks=3),
            "pp 2 (interleaved, m 1, 3 stages per rank) = 2 ranks, float32",
        ),
    ],
)
def test_a_plan_prints_one_line(plan, text):
    assert str(plan) == text


def test_the_program_is_the_registry_s():
    plan = lab.Plan(pp=2, num_microbatches=4, schedule="DualPipe")
    assert plan.program == lab.schedules.dualpipe(2, 4)
    assert (plan.num_stages, plan.has_pairs) == (2, True)
    assert lab.Plan(num_microbatches=4).program is None
    assert lab.Plan(num_microbatches=4).num_stages == 1
    looped = replace(plan, schedule="interleaved", chunks=3)
    assert looped.program == lab.schedules.interleaved(2, 4, num_virtual_stages=3)
    assert looped.num_stages == 6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 0}, "needs tp to be an integer of at least 1, got 0"),
        ({"dp": 2.0}, r"needs dp to be an integer of at least 1, got 2\.0"),
        ({"num_microbatches": True}, "needs num_microbatches to be an integer of at least 1, got True"),
        ({"chunks": 0}, "needs chunks to be an integer of at least 1, got 0"),
        ({"loss_chunk": 0}, "needs loss_chunk to be an integer of at least 1, got 0"),
        ({"schedule": "2f2b"}, "no schedule named '2f2b'; use one of gpipe, 1f1b"),
        ({"zero": 4}, "zero is one of 0, 1, 2, 3, got 4"),
        ({"zero": True}, "zero is one of 0, 1, 2, 3, got True"),
        ({"hybrid": 1}, "hybrid to be True or False, got 1"),
        ({"layout": "ring"}, "layout is one of contiguous, zigzag, striped, got 'ring'"),
        ({"precision": "fp8"}, "precision is one of float64, float32, bfloat16, got 'fp8'"),
        ({"layers": (2, -1)}, r"every stage its number of layers, got layers=\(2, -1\)"),
        ({"mtp": 0.0}, r"finite weight above 0, got mtp=0\.0; use 0\.3, or None"),
        ({"mtp": True}, "finite weight above 0, got mtp=True"),
        ({"mtp": inf}, "finite weight above 0, got mtp=inf"),
        ({"order": ("pp", "dp")}, r"order has each of pp, dp, cp, tp, ep once, got \('pp', 'dp'\)"),
    ],
)
def test_what_no_model_can_mean_is_refused_at_once(fields, message):
    with pytest.raises(ValueError, match=message):
        lab.Plan(**fields)


def test_stages_per_rank_that_a_schedule_cannot_have_are_refused():
    assert lab.Plan(pp=2, schedule="zbv", chunks=2).num_stages == 4
    with pytest.raises(ValueError, match="zbv has 4 stages on 2 ranks, got chunks=3; leave chunks"):
        _ = lab.Plan(pp=2, schedule="zbv", chunks=3).program
