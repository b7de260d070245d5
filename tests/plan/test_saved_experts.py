"""What layers keep, also with experts and latents, is, byte for byte, what autograd keeps in a run of the library."""

from dataclasses import replace

import pytest
import torch
from saved_runs import CONFIG as LLAMA
from saved_runs import LENGTH, Held
from saved_runs import V3 as SIZES

import dualpipe_lab as lab
from dualpipe_lab import plan as planner
from dualpipe_lab.cp.layouts import LAYOUTS, make_layout
from dualpipe_lab.models import LlamaConfig
from dualpipe_lab.plan.saved_activations import ExpertTable, Tables
from dualpipe_lab.tp.latent_sizes import LatentSizes
from dualpipe_lab.train import Trainer, TrainOptions

V3 = replace(SIZES, vocabulary_size=20, num_layers=2)
MLA = replace(V3, latent=LatentSizes(5, 3, 4, 2, 6))
QWEN = replace(
    V3, scoring="softmax", qk_norm=True, num_groups=1, num_groups_per_token=1, num_shared_experts=0, balance=0.0,
    selection_bias=False,
)  # fmt: skip
CONFIGS = {
    "Llama": LLAMA,
    "V3 without latents": V3,
    "V3": MLA,
    "V2-Lite": replace(MLA, latent=LatentSizes(None, 3, 4, 2, 6), num_shared_experts=2),
    "Qwen3-MoE": QWEN,
    "Mixtral": replace(QWEN, qk_norm=False, num_dense_layers=0),
    "softmax of all": replace(QWEN, normalise=False, balance=0.1),
    "sigmoid, not normalised": replace(V3, normalise=False, selection_bias=False),
}
PLANS = [
    lab.Plan(tp=2),
    lab.Plan(tp=2, sequence_parallel=True),
    lab.Plan(ep=2),
    lab.Plan(dp=2, ep=2, experts_in_data=True, precision="bfloat16"),
]


def stage_of(plan, config):
    """In a rank: the only stage of a trainer, and an input of its layers."""
    trainer = Trainer(config, plan, TrainOptions(sequence_length=LENGTH, global_batch=plan.data_size))
    (stage,) = trainer.model.stages.values()
    length = LENGTH if trainer.layout is None else trainer.layout.size(trainer.mesh.rank("cp"))
    length = length // plan.tp if plan.sequence_parallel else length
    return stage, torch.randn(1, length, config.hidden_size).to(stage.dtype).requires_grad_()


def layers_of(plan, config):
    """In a rank: by layer, the bytes that autograd keeps, and the rows that its experts have received."""
    stage, x = stage_of(plan, config)
    found = []
    for layer in stage.layers:
        kept, is_llama = Held(stage), isinstance(config, LlamaConfig)
        with kept.saving():
            outputs = [layer(x)] if is_llama else layer(x, stage.positions(x.device), 1)
        kept.walk_nodes([output.grad_fn for output in outputs if output is not None])
        found.append((kept.num_bytes, kept.rows))
    return found


def assert_kept(plan, configs):
    size = plan.world_size
    for rank, each in enumerate(lab.launch(lambda rank, size: [layers_of(plan, one) for one in configs], size)):
        for config, found in zip(configs, each, strict=True):
            here, length = plan.topology.coordinates(rank), LENGTH
            if plan.cp > 1:
                length = make_layout(plan.layout, LENGTH, plan.cp).size(here["cp"])
            tables = Tables.of(config, plan, 1, length, here.get("tp", 0))
            for number, (measured, rows) in enumerate(found):
                table = tables.layer(number)
                assert (rows is not None) == isinstance(table, ExpertTable)
                table = table if rows is None else ExpertTable(config, plan, 1, length, here.get("tp", 0), rows=rows)
                assert table.layer_bytes == measured, f"layer {number} of rank {rank}, {plan}, {table.layer()}"


@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
def test_layers_keep_what_autograd_keeps(precision):
    assert_kept(lab.Plan(precision=precision), list(CONFIGS.values()))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_layers_on_two_ranks_keep_what_autograd_keeps(plan):
    """Under ep the rows are those that the router has sent; all other tensors follow from the plan."""
    assert_kept(plan, [config for config in CONFIGS.values() if plan.ep == 1 or config is not LLAMA])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_along_cp_keep_what_autograd_keeps(layout):
    """A ring also keeps its output and a log-sum-exp, and latents where they travel; else values are padded."""
    long = replace(MLA, latent=LatentSizes(5, 60, 4, 4, 6))
    assert not long.latent.is_shorter(long.num_heads)
    for precision in ("float64", "bfloat16"):
        assert_kept(lab.Plan(cp=2, layout=layout, precision=precision), [V3, MLA, QWEN, long])


@pytest.mark.parametrize("plan", [lab.Plan(), lab.Plan(ep=2)], ids=str)
def test_an_estimate_of_balanced_routing_is_what_autograd_keeps(plan):
    """Where every token goes to all experts, the routing is balanced."""
    config = replace(MLA, num_experts_per_token=4, num_groups=1, num_groups_per_token=1)
    found, table = planner.memory(config, plan, LENGTH, plan.data_size), Tables.of(config, plan, 1, LENGTH).dense
    ends = sum(size for name, size in (table.first() | table.last()).items() if name != "logits")
    for each in lab.launch(lambda rank, size: layers_of(plan, config), plan.world_size):
        assert found.of(0).activations == ends + sum(measured for measured, _ in each)


@pytest.mark.parametrize("plan", [lab.Plan(recompute=True), lab.Plan(tp=2, sequence_parallel=True, recompute=True)])
def test_recomputed_layers_keep_their_input_and_routes(plan):
    def fn(rank, size):
        stage, x = stage_of(plan, MLA)
        kept = Held(stage)
        with kept.saving():
            outputs = [stage.run(layer, x, None, 1) for layer in stage.layers]  # of one input
        kept.walk_nodes([one.grad_fn for pair in outputs for one in pair if one is not None])
        return kept.num_bytes

    tables = Tables.of(MLA, plan, 1, LENGTH)
    assert lab.launch(fn, plan.world_size) == [tables.sparse.stored_bytes] * plan.world_size
    assert (
        tables.sparse.stored_bytes - tables.sparse.route_bytes == tables.dense.stored_bytes < tables.dense.layer_bytes
    )


@pytest.mark.parametrize("plan", [lab.Plan(mtp=0.3), lab.Plan(tp=2, sequence_parallel=True, mtp=0.3)])
def test_a_second_token_keeps_what_autograd_keeps(plan):
    """Up to the head's input: its logits are those of the first token's head."""

    def fn(rank, size):
        stage, x = stage_of(plan, MLA)
        kept = Held(stage)
        after = torch.randn_like(x).requires_grad_()
        with kept.saving():
            outputs = stage.mtp(x, after, None, 1)
        kept.add(outputs[0])  # the head's input
        kept.walk_nodes([output.grad_fn for output in outputs])
        return kept.rows, kept.num_bytes

    for rows, measured in lab.launch(fn, plan.world_size):
        tables = Tables.of(MLA, plan, 1, LENGTH)
        extra = tables.dense.mtp(has_table=False)
        layer = ExpertTable(MLA, plan, 1, LENGTH, rows=rows).layer_bytes
        hidden = tables.dense.boundary_bytes  # of the first token's last norm, which the estimate counts there
        assert measured - hidden == layer + sum(extra.values()) - extra["logits"]


def test_rows_do_not_depend_on_ep():
    config = replace(V3, num_experts=16, num_groups=1, num_groups_per_token=1, num_experts_per_token=4)
    plans = [lab.Plan(dp=8, ep=ep, experts_in_data=True) for ep in (1, 2, 4, 8)]
    assert {ExpertTable(config, plan, 1, LENGTH).num_received for plan in plans} == {4 * LENGTH}


@pytest.mark.parametrize("inside", [False, True], ids=["beside data", "inside data"])
def test_states_of_experts_follow_from_the_ranks_that_hold_and_copy_them(inside):
    """Every stage of ZeRO, from the numbers of elements alone; sizes divide, so that nothing is padded."""
    config = replace(
        V3, vocabulary_size=32, hidden_size=16, ffn_size=16, num_heads=8, num_kv_heads=4, expert_ffn_size=8,
        num_experts=8, num_dense_layers=0,
    )  # fmt: skip
    plan = lab.Plan(tp=2, ep=2, dp=4 if inside else 2, experts_in_data=inside)  # 4 copies of dense weights, 2 of others
    held = config.num_layers * config.num_experts * config.expert_parameters // 2

    def states(zero):
        return planner.memory(config, replace(plan, zero=zero), LENGTH, 4).of(0).states

    dense = states(0).num_parameters - held
    assert dense > 0
    for zero in range(4):
        whole, shard = dense + held, dense // 4 + held // 2
        weights, gradients, moments = (shard if zero >= stage else whole for stage in (3, 2, 1))
        assert states(zero) == (whole, 4 * weights, 4 * gradients, 0, 8 * moments)
