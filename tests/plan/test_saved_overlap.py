"""Overlapped stages keep the bytes, and repeat the products, that the estimate counts: all of a stage, to the byte."""

from dataclasses import replace

import pytest
from saved_runs import LENGTH, counted
from test_saved_experts import MLA, QWEN, V3

import dualpipe_lab as lab
from dualpipe_lab.plan.memory import RankMemories
from dualpipe_lab.plan.saved_activations import ID_BYTES, ExpertTable, Tables

PAIRS = {"pp": 2, "num_microbatches": 4, "schedule": "paired_1f1b", "overlap": True, "layers": (2, 1)}
ALL = {"num_experts_per_token": 4, "num_groups": 1, "num_groups_per_token": 1, "num_layers": 3}  # a balanced routing
CONFIGS = [replace(MLA, **ALL), replace(QWEN, **ALL), replace(V3, **ALL, normalise=False, num_shared_experts=2)]
AGAIN = {"recompute": True}
FIELDS = [
    {}, {"precision": "bfloat16"}, AGAIN, AGAIN | {"precision": "bfloat16"},
    AGAIN | {"layers": (1, 2), "loss_chunk": 3}, AGAIN | {"tp": 2, "sequence_parallel": True},
    AGAIN | {"tp": 2}, AGAIN | {"cp": 2}, AGAIN | {"ep": 2},
]  # fmt: skip
PLANS = [lab.Plan(**PAIRS | fields) for fields in FIELDS]


@pytest.fixture(scope="module")
def runs():
    """By plan: for every rank, by config what `counted` returns; one launch for each number of ranks."""
    found = {}
    for size in (2, 4):
        some = [plan for plan in PLANS if plan.world_size == size]
        ranks = lab.launch(
            lambda rank, size, some=some: [[counted(one, plan, LENGTH) for one in CONFIGS] for plan in some],
            size, timeout=400,
        )  # fmt: skip
        found |= {plan: [rank[number] for rank in ranks] for number, plan in enumerate(some)}
    return found


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_overlapped_stages_hold_the_estimated_bytes(plan, runs):
    """Layers, embedding, head, logits and their gradient, which the last stage's forward computes.

    Along cp a dense layer that is run again holds its positions too, 8 bytes for each, which the estimate leaves out.
    A rank keeps the ids that its shard of the embedding has; all ids of this run are in the first shard.
    """
    length = LENGTH // plan.cp
    for rank, each in enumerate(runs[plan]):
        for config, found in zip(CONFIGS, each, strict=True):
            maker = RankMemories(config, plan, LENGTH, plan.data_size * plan.num_microbatches)
            tp_rank = plan.topology.coordinates(rank).get("tp", 0)
            tables = Tables.of(config, plan, 1, length, tp_rank)
            assert len(found) == 1
            for stage, (measured, rows, _) in found.items():
                estimated = maker.stage(stage, tables)
                assert rows == [4 * length] * (len(maker.layers[stage]) - (stage == 0))
                if stage == 0:
                    measured += ID_BYTES * length * (tp_rank > 0) - 8 * length * (plan.cp > 1)
                if plan.loss_chunk is None or stage == 0:
                    assert sum(estimated) == measured, f"stage {stage}, {config}, {estimated}"


def test_a_run_repeats_the_products_before_the_exchanges_alone(runs):
    """A run computes all pairs of attention, not the causal ones alone."""
    for plan in (PLANS[0], PLANS[2]):
        for rank, each in enumerate(runs[plan]):
            for config, found in zip(CONFIGS, each, strict=True):
                widths = config.latent.key + config.latent.value if config.latent else 2 * config.dense.size_of_head
                pairs, tables = 2 * LENGTH * LENGTH * config.num_heads * widths, Tables.of(config, plan, 1, LENGTH)
                numels = 0
                for number in plan.stage_layers(config)[rank]:
                    weights = tables.dense.weights()
                    numels += (
                        sum(weights) if number == 0 else sum(weights[:-2]) + config.num_experts * config.hidden_size
                    )
                num_layers = len(plan.stage_layers(config)[rank])
                assert found[rank][2] == (2 * LENGTH * numels + num_layers * pairs if plan.recompute else 0)


def test_overlapped_experts_are_not_run_again():
    config, plan = CONFIGS[0], lab.Plan(**PAIRS, recompute=True)
    plain = replace(plan, overlap=False)
    one, other = (ExpertTable(config, each, 1, LENGTH) for each in (plan, plain))
    assert one.layer_bytes == other.layer_bytes
    assert other.stored_bytes < one.stored_bytes < one.layer_bytes
    assert one.working_bytes < other.working_bytes
