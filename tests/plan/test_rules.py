"""Every rule of a plan and a model: one message with the rule, the values and a plan that fits."""

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

REFUSED = [  # plan, the rule with its values, the nearest plan
    ({"tp": 3}, "num_heads must divide among the ranks, got 8 on 3 ranks", "dp 3 = 3 ranks"),
    ({"ep": 2}, "ep shards experts, and this model has none, got ep 2", "dp 2 = 2 ranks"),
    ({"pp": 16, "dp": 2}, "every stage needs a layer, got 8 layers for pp 16", r"pp 8 \(1f1b, m 1\) x dp 4"),
    ({"schedule": "pipedream", "pp": 2}, "needs one version of the weights per step", r"pp 2 \(1f1b, m 1\)"),
    ({"chunks": 2}, "chunks are stages per rank of pp, got chunks=2 and pp 1", "dp 1 = 1 rank"),
    (
        {"pp": 3, "schedule": "dualpipe", "num_microbatches": 6},
        "dualpipe needs an even number of ranks, got 3",
        r"pp 3 \(1f1b, m 6\)",
    ),
    (
        {"pp": 2, "schedule": "dualpipe", "num_microbatches": 5},
        "dualpipe needs an even number of microbatches, half for each direction, got 5",
        r"pp 2 \(dualpipe, m 6\)",
    ),
    (
        {"pp": 4, "schedule": "dualpipev", "num_microbatches": 3},
        "dualpipev needs at least two microbatches per rank, got 3 for 4 ranks",
        r"pp 4 \(1f1b, m 3\)",
    ),
    (
        {"pp": 4, "schedule": "interleaved", "chunks": 3, "num_microbatches": 4},
        "a stage has a layer, got 8 layers for 12 stages",
        r"pp 4 \(interleaved, m 4, 2 stages per rank\)",
    ),
    (
        {"pp": 2, "schedule": "zbv", "chunks": 3},
        "zbv has 4 stages on 2 ranks, got chunks=3",
        r"pp 2 \(zbv, m 1, 2 stages per rank\)",
    ),
    (
        {"pp": 2, "layers": (3, 4)},
        r"layers are given for each of 2 stages, from 1 between the ends, 8 in all, got \(3, 4\)",
        r"pp 2 \(1f1b, m 1\)",
    ),
    ({"overlap": True, "dp": 2}, "this model has none, got overlap=True", "dp 2 = 2 ranks, float32"),
    ({"zero": 1}, "ZeRO-1 shards over the ranks of dp, cp and ep that copy a weight", "dp 1 = 1 rank"),
    (
        {"dp": 2, "mtp": 0.3},
        "a second token is predicted by a V3-style model, got a LlamaConfig",
        "dp 2 = 2 ranks, float32",
    ),
    (
        {"zero": 1, "hybrid": True, "dp": 4},
        "hybrid ZeRO shards within a node, got ranks_per_node=None",
        r"dp 4 \(ZeRO-1\)",
    ),
    ({"hybrid": True, "dp": 4, "ranks_per_node": 2}, "got zero=0; use zero=1, 2 or 3", "dp 4 = 4 ranks, 2 ranks"),
    (
        {"zero": 1, "hybrid": True, "dp": 2, "tp": 2, "ranks_per_node": 2},
        "several ranks of each of several nodes, got 1 of 2 copies on a node of 2",
        r"dp 2 \(ZeRO-1\) x tp 2",
    ),
    ({"dp": 4, "ranks_per_node": 3}, "ranks_per_node must divide the ranks, got 3 and 4 ranks", "dp 4 = 4 ranks"),
]
REFUSED_V3 = [
    ({"ep": 3}, "experts must divide among the ranks, got 8 experts on 3 ranks", "dp 3 = 3 ranks"),
    ({"dp": 3, "ep": 2, "experts_in_data": True}, "ep must divide them, got ep 2 and dp 3", "dp 3 = 3 ranks"),
    ({"overlap": True, "dp": 2}, "of a forward and a backward, and a single stage has none", "dp 2 = 2 ranks"),
    (
        {"overlap": True, "pp": 2, "num_microbatches": 4},
        "overlap needs pairs of a forward and a backward, and 1f1b has none",
        r"pp 2 \(1f1b, m 4\) = 2 ranks, float32",
    ),
    (
        {"zero": 3, "dp": 2, "loss_chunk": 64, "mtp": 0.3},
        "frees a stage that predicts a second token before a loss in chunks uses its head, got zero=3",
        r"dp 2 \(ZeRO-2\) = 2 ranks, loss in chunks of 64 tokens, a second token of weight 0\.3, float32",
    ),
    (
        {"zero": 1, "hybrid": True, "dp": 6, "ep": 2, "experts_in_data": True, "ranks_per_node": 3},
        r"edp group \[0, 2, 4\] lies unevenly on nodes of 3 ranks",
        r"dp 6 \(ZeRO-1\)",
    ),
]
REFUSED_OTHERS = [  # with another model or a length of sequences
    (
        {"dp": 2, "tp": 3},
        replace(LLAMA, num_heads=6, num_kv_heads=2, head_size=8),
        None,
        "KV heads must divide among the ranks, or ranks among KV heads, got 2 heads on 3 ranks",
        "dp 3 x tp 2 = 6 ranks",
    ),
    ({"cp": 2}, LLAMA, 18, "18 positions do not divide", r"cp 2 \(striped\)"),
    (
        {"tp": 4, "sequence_parallel": True},
        LLAMA,
        18,
        "shards the tokens of a rank evenly along tp, got 18 tokens and tp 4",
        "tp 4 = 4 ranks",
    ),
    ({"dp": 2}, LLAMA, 0, "a sequence has a token at least, got a length of 0", None),
    (
        {"zero": 3, "dp": 2, "loss_chunk": 64},
        replace(LLAMA, tied=True),
        None,
        "frees a stage with a tied table at both ends before a loss in chunks uses its head, got zero=3",
        r"dp 2 \(ZeRO-2\) = 2 ranks, loss in chunks of 64 tokens",
    ),
    (
        {"tp": 2, "mtp": 0.3},
        replace(V3, hidden_size=9, num_heads=2, num_kv_heads=2, head_size=2),
        None,
        "the second token's projection shares hidden_size out among the ranks of tp, got 9 on 2",
        "tp 2 = 2 ranks, float32",
    ),
    (
        {"dp": 2, "mtp": 0.3},
        V3,
        1,
        "a second token needs sequences of 2 tokens or more, got a length of 1",
        "dp 2 = 2 ranks, float32",
    ),
    ({"tp": 2}, replace(LLAMA, hidden_size=60), None, "hidden_size must divide by num_heads, got 60 and 8", None),
]
REFUSED_OTHERS += [(row[0], LLAMA, None, *row[1:]) for row in REFUSED] + [
    (row[0], V3, None, *row[1:]) for row in REFUSED_V3
]


@pytest.mark.parametrize(("fields", "config", "length", "rule", "nearest"), REFUSED_OTHERS)
def test_a_broken_rule_is_told_with_the_nearest_plan(fields, config, length, rule, nearest):
    plan = lab.Plan(**fields)
    remedy = rf"no plan of {plan.world_size} ranks fits" if nearest is None else rf"that fits is {nearest}"
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
