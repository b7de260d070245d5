"""Who sums what with whom: groups by hand, the norm's counts add up to the model, tables, drawings."""

from dataclasses import replace

import pytest

import dualpipe_lab as lab
from dualpipe_lab.models import LlamaConfig, V3MoEConfig

LLAMA = LlamaConfig(num_layers=4, num_heads=8, num_kv_heads=2)
V3 = V3MoEConfig(num_layers=4, balance=0.0)


def sums(plan, config, kind):
    """Why, the ranks of the first group, and how many groups there are."""
    row = plan.sums(config).of(kind)
    return [(one.why, one.ranks, row.num_ranks // len(one.ranks)) for one in row.sums]


def test_dense_weights_are_summed_over_every_data_axis_and_experts_over_their_copies():
    plan = lab.Plan(dp=2, ep=2, cp=2, tp=2)
    assert sums(plan, V3, "attention") == [("dp x ep x cp", (0, 2, 4, 6, 8, 10, 12, 14), 2)]
    assert sums(plan, V3, "experts") == [("dp x cp", (0, 2, 8, 10), 4)]
    within = lab.Plan(dp=4, ep=2, experts_in_data=True)
    assert sums(within, V3, "router") == [("dp", (0, 1, 2, 3), 1)]
    assert sums(within, V3, "experts") == [("edp", (0, 2), 2)]
    alone = lab.Plan(ep=2)
    assert sums(alone, V3, "experts") == []
    assert alone.sums(V3).of("experts").state == "with the weight"


def test_copies_along_tp_are_summed_where_their_gradients_are_partial():
    plain, sequence = lab.Plan(tp=4), lab.Plan(tp=4, sequence_parallel=True)
    config = LlamaConfig(num_layers=4, num_heads=8, num_kv_heads=2, qk_norm=True)
    assert sums(plain, config, "norms") == []
    assert sums(sequence, config, "norms") == [("tp", (0, 1, 2, 3), 1)]
    assert sums(plain, config, "norms of heads") == [("tp", (0, 1, 2, 3), 1)]
    assert sums(plain, replace(V3, qk_norm=True), "norms of heads") == [("tp", (0, 1, 2, 3), 1)]
    assert sums(plain, config, "keys and values") == [("KV heads", (0, 1), 2)]
    assert sums(plain, config, "queries and output") == []
    assert plain.sums(config).of("keys and values").norm == "first copy of a KV head"


def test_mirrors_add_before_the_data_ranks_and_tied_stages_add_too():
    plan = lab.Plan(pp=4, dp=2, schedule="dualpipe", num_microbatches=8)
    assert sums(plan, LLAMA, "embedding") == [("mirrors", (0, 6), 2), ("dp", (0, 1), 2)]
    assert sums(plan, LLAMA, "head") == [("mirrors", (0, 6), 2), ("dp", (0, 1), 2)]
    assert sums(plan, LLAMA, "norms") == [("mirrors", (0, 6), 4), ("dp", (0, 1), 4)]
    assert plan.sums(LLAMA).of("norms").norm == "first mirror, first copy"
    tied = LlamaConfig(num_layers=4, tied=True)
    assert sums(lab.Plan(pp=2), tied, "tied embedding") == [("tied stages", (0, 1), 1)]
    assert sums(lab.Plan(), tied, "tied embedding") == []
    with pytest.raises(ValueError, match="no row 'head'; there are tied embedding, attention"):
        lab.Plan().sums(tied).of("head")


def test_a_second_token_shares_the_embedding_between_two_stages():
    plan = lab.Plan(pp=2, dp=2, mtp=0.3)
    assert sums(plan, V3, "tied embedding") == [("dp", (0, 1), 2), ("tied stages", (0, 2), 2)]
    assert sums(plan, V3, "second token's projection") == [("dp", (2, 3), 1)]
    assert sums(plan, V3, "head") == [("dp", (2, 3), 1)]
    assert sums(lab.Plan(dp=2, mtp=0.3), V3, "embedding") == [("dp", (0, 1), 1)]
    with pytest.raises(ValueError, match='there is no row "second token\'s projection"'):
        lab.Plan(dp=2).sums(V3).of("second token's projection")


@pytest.mark.parametrize(
    ("fields", "norm", "state"),
    [
        ({"dp": 4}, "first copy", "in full on every copy"),
        ({"dp": 4, "zero": 2}, "each its shard", "1 / 4 on each of dp"),
        (
            {"dp": 4, "zero": 1, "hybrid": True, "ranks_per_node": 2},
            "each shard on the first node",
            "shards over the copies on a node (dp)",
        ),
        ({"tp": 2}, "every rank", "with the weight"),
    ],
)
def test_norm_and_optimizer_state(fields, norm, state):
    row = lab.Plan(**fields).sums(LLAMA).of("attention")
    assert (row.norm, row.state) == (norm, state)


def test_the_table_prints_and_shows_and_a_plan_that_does_not_fit_is_refused():
    table = lab.Plan(dp=2, zero=1).sums(LLAMA)
    lines = str(table).splitlines()
    assert lines[0] == "dp 2 (ZeRO-1) = 2 ranks, float32"
    assert lines[1].split("  ")[0] == "parameter"
    assert [line.split("  ")[0] for line in lines[2:]] == ["embedding", "attention", "norms", "dense ffn", "head"]
    assert table._repr_html_().count("<tr>") == 6
    with pytest.raises(ValueError, match="that fits is"):
        lab.Plan(tp=3).sums(LLAMA)


@pytest.mark.parametrize("config", [LLAMA, V3])
def test_the_axes_are_those_over_which_the_optimizers_sum(config):
    from dualpipe_lab.dp.sums import copy_axes

    for plan in lab.Plan.all(config, 8, zeros=[0], schedule_names=["1f1b"]):
        dense, experts = (set(axes) - {"edp"} for axes in copy_axes(plan.topology))
        assert set(plan.copy_axes) == {axis for axis in dense if plan.topology.size(axis) > 1}
        if config is V3:
            along = {one.why for one in plan.sums(config).of("experts").sums if one.why != "tp"}
            found = set(" x ".join(along).split(" x ")) - {"", "edp"}
            assert found == {axis for axis in experts if plan.topology.size(axis) > 1}
