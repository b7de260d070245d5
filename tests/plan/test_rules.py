"""Every rule of a plan and a model: one message with the rule, the values and a plan that fits."""

import re
from dataclasses import replace
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dualpipe_lab as lab
from dualpipe_lab.models import LlamaConfig, V3MoEConfig
from dualpipe_lab.plan.rules import distance, factorisations, first_problem

LLAMA = LlamaConfig(num_layers=8, num_heads=8, num_kv_heads=4)
V3 = V3MoEConfig(num_layers=8, num_heads=8, num_kv_heads=4, balance=0.0)
FIELDS = [name for name in lab.Plan().describe() if name not in ("order", "recompute", "precision")]

UNEVEN = replace(LLAMA, num_heads=6, num_kv_heads=2, head_size=8)
NARROW = replace(V3, hidden_size=9, num_heads=2, num_kv_heads=2, head_size=2)
PAIRS = {"schedule": "dualpipe", "pp": 2}
HYBRID = {"zero": 1, "hybrid": True}
WITHIN = {"ep": 2, "experts_in_data": True}
FREED = {"zero": 3, "dp": 2, "loss_chunk": 64}
REFUSED = [  # plan, model, length of sequences, the rule with its values; None: no plan of as many ranks fits
    ({"dp": 2, "tp": 3}, UNEVEN, None, "KV heads must divide among the ranks, .*, got 2 heads on 3 ranks"),
    ({"cp": 2}, LLAMA, 18, "18 positions do not divide"),
    ({"tp": 4, "sequence_parallel": True}, LLAMA, 18, "the tokens of a rank evenly along tp, got 18 tokens and tp 4"),
    ({"dp": 2}, LLAMA, 0, "a sequence has a token at least, got a length of 0", None),
    (FREED, replace(LLAMA, tied=True), None, "frees a stage with a tied table at both ends .* its head, got zero=3"),
    (FREED | {"mtp": 0.3}, V3, None, "frees a stage that predicts a second token .* its head, got zero=3"),
    ({"tp": 2, "mtp": 0.3}, NARROW, None, "projection shares hidden_size out among the ranks of tp, got 9 on 2"),
    ({"dp": 2, "mtp": 0.3}, V3, 1, "a second token needs sequences of 2 tokens or more, got a length of 1"),
    ({"dp": 2, "mtp": 0.3}, LLAMA, None, "a second token is predicted by a V3-style model, got a LlamaConfig"),
    ({"tp": 2}, replace(LLAMA, hidden_size=60), None, "hidden_size must divide by num_heads, got 60 and 8", None),
    ({"tp": 3}, LLAMA, None, "num_heads must divide among the ranks, got 8 on 3 ranks"),
    ({"ep": 2}, LLAMA, None, "ep shards experts, and this model has none, got ep 2"),
    ({"ep": 3}, V3, None, "experts must divide among the ranks, got 8 experts on 3 ranks"),
    ({"dp": 3, **WITHIN}, V3, None, "ep must divide them, got ep 2 and dp 3"),
    ({"pp": 16, "dp": 2}, LLAMA, None, "every stage needs a layer, got 8 layers for pp 16"),
    ({"pp": 2, "schedule": "pipedream"}, LLAMA, None, "needs one version of the weights per step"),
    ({"chunks": 2}, LLAMA, None, "chunks are stages per rank of pp, got chunks=2 and pp 1"),
    (PAIRS | {"pp": 3, "num_microbatches": 6}, LLAMA, None, "dualpipe needs an even number of ranks, got 3"),
    (PAIRS | {"num_microbatches": 5}, LLAMA, None, "even number of microbatches, half for each direction, got 5"),
    (
        PAIRS | {"pp": 4, "num_microbatches": 3, "schedule": "dualpipev"},
        LLAMA,
        None,
        "two microbatches per rank, got 3",
    ),
    ({"pp": 4, "schedule": "interleaved", "chunks": 3}, LLAMA, None, "a stage has a layer, got 8 layers for 12 stages"),
    ({"pp": 2, "schedule": "zbv", "chunks": 3}, LLAMA, None, "zbv has 4 stages on 2 ranks, got chunks=3"),
    (
        {"pp": 2, "layers": (3, 4)},
        LLAMA,
        None,
        r"for each of 2 stages, from 1 between the ends, 8 in all, got \(3, 4\)",
    ),
    ({"overlap": True, "dp": 2}, LLAMA, None, "this model has none, got overlap=True"),
    ({"overlap": True, "dp": 2}, V3, None, "of a forward and a backward, and a single stage has none"),
    ({"overlap": True, "pp": 2, "num_microbatches": 4}, V3, None, "needs pairs .* and a backward, and 1f1b has none"),
    ({"zero": 1}, LLAMA, None, "ZeRO-1 shards over the ranks of dp, cp and ep that copy a weight"),
    ({**HYBRID, "dp": 4}, LLAMA, None, "hybrid ZeRO shards within a node, got ranks_per_node=None"),
    ({"hybrid": True, "dp": 4, "ranks_per_node": 2}, LLAMA, None, "got zero=0; use zero=1, 2 or 3"),
    ({**HYBRID, "dp": 2, "tp": 2, "ranks_per_node": 2}, LLAMA, None, "nodes, got 1 of 2 copies on a node of 2"),
    ({**HYBRID, **WITHIN, "dp": 6, "ranks_per_node": 3}, V3, None, r"\[0, 2, 4\] lies unevenly on nodes of 3 ranks"),
    ({"dp": 4, "ranks_per_node": 3}, LLAMA, None, "ranks_per_node must divide the ranks, got 3 and 4 ranks"),
]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[3])
def test_a_broken_rule_is_told_with_a_plan_that_fits(row):
    fields, config, length, rule, *nothing = row
    plan = lab.Plan(**fields)
    remedy = f"that fits is {re.escape(str(plan.nearest(config, length)))}"
    remedy = f"no plan of {plan.world_size} ranks fits" if nothing else remedy
    with pytest.raises(ValueError, match=rf"(?s){rule}.*; .*{remedy}"):
        plan.check(config, length)


def test_a_world_of_another_size_gets_a_plan_of_its_size():
    with pytest.raises(
        ValueError, match=r"is a plan for 8 ranks, the world has 4; the nearest plan of 4 ranks .* dp 4 ="
    ):
        lab.Plan(dp=8).check(LLAMA, num_ranks=4)
    lab.Plan(dp=8).check(LLAMA, num_ranks=8)


def test_a_number_of_ranks_that_nothing_fits_is_told():
    config = replace(LLAMA, num_layers=1)
    with pytest.raises(ValueError, match="no plan of 7 ranks fits this model"):
        lab.Plan(tp=7).check(replace(config, hidden_size=60))
    tokens = replace(LLAMA, num_layers=2, hidden_size=64)
    assert lab.Plan(tp=7).nearest(tokens) == lab.Plan(dp=7)


plans = st.builds(
    lab.Plan,
    pp=st.integers(1, 4),
    dp=st.integers(1, 3),
    cp=st.integers(1, 3),
    tp=st.integers(1, 3),
    ep=st.integers(1, 3),
    num_microbatches=st.integers(1, 9),
    schedule=st.sampled_from(lab.schedules.names()),
    chunks=st.none() | st.integers(1, 3),
    zero=st.integers(0, 3),
    hybrid=st.booleans(),
    experts_in_data=st.booleans(),
    sequence_parallel=st.booleans(),
    layout=st.sampled_from(("contiguous", "zigzag", "striped")),
    overlap=st.booleans(),
    loss_chunk=st.sampled_from((None, 5)),
    mtp=st.sampled_from((None, 0.3)),
    ranks_per_node=st.none() | st.integers(1, 4),
)
configs = st.sampled_from([LLAMA, replace(LLAMA, tied=True), V3, replace(V3, balance=0.1), replace(V3, num_layers=3)])


@settings(deadline=None, max_examples=60)
@given(plans, configs, st.none() | st.integers(1, 24))
def test_the_nearest_plan_is_legal_and_a_legal_plan_is_its_own(plan, config, length):
    nearest = plan.nearest(config, length)
    assert nearest is not None, "copies along dp always fit these models"
    nearest.check(config, length, plan.world_size)
    assert nearest == plan.nearest(config, length)
    if first_problem(plan, config, length) is None:
        assert nearest == plan
    else:
        assert nearest != plan
        with pytest.raises(ValueError, match="that fits is"):
            plan.check(config, length)


def test_nothing_legal_is_nearer_than_the_nearest():
    """Against every plan of 4 ranks with the same settings: the groups of rules may be searched one by one."""
    wrong = lab.Plan(tp=3, num_microbatches=5, zero=2, pp=2, schedule="dualpipe", layout="contiguous")
    found = wrong.nearest(LLAMA, 12, num_ranks=4)
    every = [
        candidate
        for m in range(3, 7)
        for layout in ("contiguous", "zigzag", "striped")
        for candidate in lab.Plan.all(LLAMA, 4, 12, num_microbatches=m, layout=layout, schedule="dualpipe")
    ]
    assert len(every) > 500
    assert distance(wrong, found, FIELDS) == min(distance(wrong, candidate, FIELDS) for candidate in every)


@pytest.mark.parametrize("config", [LLAMA, V3])
def test_all_plans_are_legal_distinct_and_complete(config):
    found = list(lab.Plan.all(config, 8, 32, num_microbatches=8))
    assert len(set(found)) == len(found)
    for plan in found[::7]:
        plan.check(config, 32, 8)
    axes = {(plan.pp, plan.dp, plan.cp, plan.tp, plan.ep) for plan in found if not plan.experts_in_data}
    allowed = {sizes for sizes in factorisations(8, 5) if sizes[4] == 1 or config is V3}
    assert axes == allowed
    assert {plan.schedule for plan in found} == set(lab.schedules.names(synchronous=True))
    assert any(plan.experts_in_data for plan in found) is (config is V3)
    for plan in found:
        assert plan.zero == 0 or plan.num_copies > 1


def test_all_is_lazy():
    assert next(lab.Plan.all(LLAMA, 4096, num_microbatches=1)).world_size == 4096


@given(st.integers(1, 60), st.integers(1, 4))
def test_factorisations_are_all_ordered_products(number, factors):
    found = list(factorisations(number, factors))
    assert found == sorted(set(found))
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    assert found == [sizes for sizes in product(divisors, repeat=factors) if prod(sizes) == number]


def test_stages_get_the_plan_s_layers_or_those_of_equal_cost():
    assert [len(stage) for stage in lab.Plan(pp=2, layers=(0, 8)).stage_layers(LLAMA)] == [0, 8]
    v_shaped = lab.Plan(pp=2, schedule="dualpipev", num_microbatches=4)
    assert [len(stage) for stage in v_shaped.stage_layers(LLAMA)] == [2, 2, 2, 2]
    lab.Plan(pp=2, layers=(0, 8)).check(LLAMA)


def test_overlapped_experts_take_a_second_token_and_a_loss_in_chunks():
    fields = {"schedule": "dualpipe", "num_microbatches": 4, "overlap": True, "loss_chunk": 64, "mtp": 0.3}
    lab.Plan(pp=2, dp=2, zero=3, **fields).check(V3)
    small = replace(V3, num_layers=8, num_dense_layers=0, vocabulary_size=1)
    sizes = [[len(s) for s in lab.Plan(pp=2, mtp=one).stage_layers(small)] for one in (None, 0.3)]
    assert sizes == [[4, 4], [5, 3]], "the last stage gives a layer away for the second token"
