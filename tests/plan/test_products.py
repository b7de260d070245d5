"""FLOPs of a layer beside the papers' formulas, and the shards of a product beside the whole."""

from dataclasses import replace

import pytest

from dualpipe_lab.cp.layouts import critical_path, make_layout, visible_pairs
from dualpipe_lab.models import LlamaConfig, V3MoEConfig
from dualpipe_lab.plan import GptConfig, Plan
from dualpipe_lab.plan.products import RankWork, causal_pairs, model_flops
from dualpipe_lab.tp.latent_sizes import LatentSizes

LLAMA3 = {
    "8b": LlamaConfig(128256, 4096, 14336, 32, 32, 8),
    "70b": LlamaConfig(128256, 8192, 28672, 80, 64, 8),
    "405b": LlamaConfig(128256, 16384, 53248, 126, 128, 8),
}
V3 = V3MoEConfig(
    vocabulary_size=129280, hidden_size=7168, num_layers=61, num_dense_layers=3, num_heads=128, ffn_size=18432,
    expert_ffn_size=2048, num_experts=256, num_experts_per_token=8, num_groups=8, num_groups_per_token=4,
    latent=LatentSizes(),
)  # fmt: skip


@pytest.mark.parametrize(("layers", "hidden", "heads", "length"), [(24, 2304, 24, 2048), (96, 12288, 96, 2048)])
def test_a_gpt_has_the_flops_of_narayanan_s_formula(layers, hidden, heads, length):
    """3/4 of 96 B s l h^2 (1 + s / 6h + V / 16lh): theirs recompute, and count all pairs (arXiv 2104.04473)."""
    found = model_flops(GptConfig(51200, hidden, layers, heads), length, causal=False)
    formula = 72 * length * layers * hidden**2 * (1 + length / (6 * hidden) + 51200 / (12 * layers * hidden))
    assert found == pytest.approx(formula, rel=1e-12)


@pytest.mark.parametrize(("size", "full", "halved"), [("405b", 2625.4, 2524.0), ("70b", 481.4, 449.2)])
def test_a_token_of_llama_3_has_the_flops_that_frameworks_print(size, full, halved):
    """GFLOP per token at 8,192 tokens: torchtitan counts all pairs, Megatron half of them."""
    model = LLAMA3[size]
    assert model_flops(model, 8192, causal=False) / 8192 / 1e9 == pytest.approx(full, abs=0.06)
    assert model_flops(model, 8192) / 8192 / 1e9 == pytest.approx(halved, abs=0.06)


@pytest.mark.parametrize("model", [LLAMA3["8b"], V3, replace(V3, latent=None, num_kv_heads=8, qk_norm=True)])
def test_products_are_two_flops_for_each_parameter_that_a_token_uses(model):
    work = RankWork(model, Plan(), num_rows=1, sequence_length=256 * 8)
    units = [*(work.layer(number) for number in range(model.num_layers)), work.head()]
    flops = sum(product.flops for unit in units for product in unit.products)
    costs = model.layer_costs if isinstance(model, V3MoEConfig) else None
    if costs is None:
        used = model.num_parameters() - model.vocabulary_size * model.hidden_size  # the embedding is looked up
        norms = (2 * model.num_layers + 1) * model.hidden_size
    else:
        used = sum(costs) + model.vocabulary_size * model.hidden_size
        latent = model.latent
        each = 2 * model.hidden_size if latent is None else 2 * model.hidden_size + latent.query_rank + latent.kv_rank
        norms = model.num_layers * each
    assert flops == 2 * (used - norms) * work.num_tokens


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("model", [LLAMA3["8b"], GptConfig(51200, 4096, 4, 32), V3])
def test_the_shards_of_tp_add_up(model, tp):
    """But for a router, for experts that every rank of tp computes, and for latents without sequence parallelism."""
    whole = RankWork(model, Plan(), 2, 512).layer(5)
    part = RankWork(model, Plan(tp=tp), 2, 512).layer(5)
    copied = {"router", "experts' input", "experts' output", "query latent", "key latent"}
    for one, all_of in zip(part.products, whole.products, strict=True):
        assert one.name == all_of.name
        assert one.flops * (1 if one.name in copied else tp) == all_of.flops
    assert part.core_flops * tp == whole.core_flops


def test_sequence_parallelism_shares_latents_and_a_framework_may_share_routing():
    plan = Plan(tp=4, sequence_parallel=True)
    whole, part = (RankWork(V3, one, 2, 512, splits_routing=True).layer(5) for one in (Plan(), plan))
    assert [4 * product.flops for product in part.products] == [product.flops for product in whole.products]


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_no_layout_computes_fewer_pairs_than_an_even_share(layout, num_ranks):
    even = causal_pairs(64) / num_ranks
    assert even <= causal_pairs(64, num_ranks, layout) <= 2 * even + 64


def test_experts_are_shared_out_over_ep_and_rows_are_not():
    for ep in (1, 4, 64):
        work = RankWork(V3, Plan(dp=64, ep=ep, experts_in_data=True), 1, 4096).layer(60)
        into = next(product for product in work.products if product.name == "experts' input")
        assert into.times == 256 // ep
        assert into.rows * into.times == 8 * 4096


@pytest.mark.parametrize(("tp", "ep"), [(2, 4), (8, 16), (8, 32)])
def test_ranks_of_tp_that_share_routing_out_have_a_part_of_the_experts_each(tp, ep):
    plan = Plan(tp=tp, dp=64, ep=ep, experts_in_data=True, sequence_parallel=True)
    for splits, shared in ((False, 1), (True, tp)):
        work = RankWork(V3, plan, 1, 4096, splits).layer(60)
        for name in ("experts' input", "experts' output"):
            product = next(one for one in work.products if one.name == name)
            assert product.times == 256 // ep // shared
            assert product.rows * product.times == 8 * 4096 // shared


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_the_closed_form_of_the_slowest_rank_is_the_layout_s_own_count(layout, num_ranks):
    for length in (num_ranks * 4, num_ranks * 6, num_ranks * 10):
        expected = critical_path(visible_pairs(make_layout(layout, length, num_ranks)))
        assert causal_pairs(length, num_ranks, layout) == expected
    if layout != "zigzag":
        uneven = num_ranks * 5 + num_ranks // 2
        assert causal_pairs(uneven, num_ranks, layout) == critical_path(
            visible_pairs(make_layout(layout, uneven, num_ranks))
        )
