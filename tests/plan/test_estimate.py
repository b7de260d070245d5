"""An estimate: states equal what the trainer holds, byte for byte; tables and peaks are those of the library."""

import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch

import dualpipe_lab as lab
from dualpipe_lab import plan as planner
from dualpipe_lab.dp.measure import storage_bytes
from dualpipe_lab.models import LlamaConfig, V3MoEConfig, config_from_pretrained
from dualpipe_lab.plan.kept_tensors import LAB, LayerTable
from dualpipe_lab.plan.step_time import step_time
from dualpipe_lab.pp.program import F
from dualpipe_lab.tp.closed_forms import layer_kept_numbers
from dualpipe_lab.train import Batch, Options, Trainer

CONFIG = LlamaConfig(
    vocabulary_size=19, hidden_size=8, ffn_size=10, num_layers=5, num_heads=4, num_kv_heads=2, qk_norm=True
)
V3 = V3MoEConfig(
    vocabulary_size=19, hidden_size=8, ffn_size=10, num_layers=5, num_heads=4, num_kv_heads=2, expert_ffn_size=6,
    num_experts=4, num_groups=2, num_groups_per_token=1,
)  # fmt: skip
LENGTH = 8
SYNCHRONOUS = lab.schedules.names(synchronous=True)
PRECISIONS = ("float64", "float32", "bfloat16")


def cluster(num_ranks, ranks_per_node=8):
    return planner.Cluster.of("h100", num_ranks, min(ranks_per_node, num_ranks))


def held(trainer):
    """Bytes of parameters, gradients, master weights and moments that a rank's tensors have."""
    optimizer, zero = trainer.optimizer, trainer.plan.zero
    adams = [shard.adam for shard in optimizer.local_shards]
    if zero == 3:
        weights, gradients = ([getattr(flat, name) for flat in optimizer.flats] for name in ("shard", "grad"))
    else:
        weights = list(trainer.model.parameters())
        gradients = optimizer.reducer.shards if zero == 2 else [parameter.grad for parameter in weights]
    masters = [adam.weight for adam in adams if adam.weight is not adam.working]
    moments = [tensor for adam in adams for tensor in (adam.exp_avg, adam.exp_avg_sq)]
    return tuple(map(storage_bytes, (weights, gradients, masters, moments)))


def train(plan, config):
    """In a rank: what it holds behind a step."""
    num_rows = plan.data_size * plan.num_microbatches
    trainer = Trainer(config, plan, Options(sequence_length=LENGTH, global_batch=num_rows))
    local = LENGTH if trainer.layout is None else trainer.layout.size(trainer.mesh.rank("cp"))
    ids = [torch.zeros(1, local, dtype=torch.long) for _ in range(plan.num_microbatches)]
    trainer.step(Batch(ids, ids, num_rows * LENGTH, num_rows, ids, ids))
    return held(trainer)


def assert_held(cases):
    """Train under each plan, all of one number of ranks, and compare every rank's bytes."""
    size = cases[0][0].world_size

    def fn(rank, world_size):
        return [train(plan, config) for plan, config in cases]

    for rank, found in enumerate(lab.launch(fn, size, output="collect", timeout=240)):
        for (plan, config), measured in zip(cases, found, strict=True):
            here = plan.topology.coordinates(rank)
            states = planner.model_states(config, plan, here.get("pp", 0), here.get("tp", 0))
            assert measured == states[1:], f"rank {rank}, {plan}"
            assert measured[0] > 0 < measured[3]


def test_two_ranks_hold_the_bytes_of_the_estimate(some):
    every_stage = [lab.Plan(dp=2, zero=zero, precision="bfloat16") for zero in (0, 1, 2, 3)]
    data = [lab.Plan(dp=2, zero=zero, precision=precision) for zero in (0, 1, 2, 3) for precision in PRECISIONS[:2]]
    others = [
        lab.Plan(tp=2, sequence_parallel=True, precision="bfloat16"),
        lab.Plan(cp=2, zero=3),
        *(lab.Plan(pp=2, num_microbatches=4, schedule=name) for name in ("1f1b", "dualpipe", "zbv")),
    ]
    tied = [lab.Plan(pp=2, num_microbatches=2, schedule="1f1b"), lab.Plan(dp=2, zero=3)]
    experts = [lab.Plan(ep=2, zero=zero) for zero in (0, 1, 3)]
    experts.append(lab.Plan(dp=2, ep=2, experts_in_data=True, zero=2, multi_token=0.3))
    cases = [(plan, CONFIG) for plan in data + others] + [(plan, replace(CONFIG, tied=True)) for plan in tied]
    cases += [(plan, V3) for plan in experts]
    assert_held([(plan, CONFIG) for plan in every_stage] + some(cases, 7))


def test_four_ranks_hold_the_bytes_of_the_estimate():
    dense = [
        lab.Plan(dp=4, zero=1, precision="bfloat16"),
        lab.Plan(dp=4, zero=3, hybrid=True, ranks_per_node=2),
        lab.Plan(tp=4),  # more ranks than key heads, and an uneven vocabulary
        lab.Plan(pp=2, dp=2, num_microbatches=4, schedule="dualpipe", zero=2, layers=(4, 1)),
        lab.Plan(pp=2, tp=2, num_microbatches=4, schedule="interleaved", chunks=2),
    ]
    experts = [lab.Plan(dp=4, ep=2, experts_in_data=True, zero=1), lab.Plan(pp=2, ep=2, num_microbatches=4, zero=3)]
    assert_held([(plan, CONFIG) for plan in dense] + [(plan, V3) for plan in experts])


def test_a_hybrid_plan_has_the_nodes_of_the_cluster():
    plan = lab.Plan(dp=16, zero=3, hybrid=True, num_microbatches=2, precision="bfloat16")
    arguments = cluster(16), LENGTH, 32
    named = replace(plan, ranks_per_node=8)
    assert planner.estimate(CONFIG, plan, *arguments).of(0) == planner.estimate(CONFIG, named, *arguments).of(0)
    assert step_time(CONFIG, plan, *arguments) == step_time(CONFIG, named, *arguments)
    for compute in (planner.estimate, step_time):
        with pytest.raises(ValueError, match="the cluster has 8 ranks per node, got a plan with ranks_per_node=4"):
            compute(CONFIG, replace(plan, ranks_per_node=4), *arguments)


def test_states_of_many_plans_are_those_of_the_flat_buffers_that_messages_are_counted_for():
    """The counts of `Plan.traffic` are exact, and a gather of weights moves the shards of the states."""
    for zero, dp in product((1, 2), (2, 3, 4)):
        plan = lab.Plan(dp=dp, zero=zero, precision="bfloat16")
        gathered = plan.traffic(CONFIG, dp, LENGTH).calls(0)["all_gather_single"][1]
        assert gathered == planner.model_states(CONFIG, plan).parameters // dp * (dp - 1)


def test_a_layer_keeps_what_the_closed_form_says():
    """That form is held against what autograd keeps, in `tests/tp/test_tp_overlap.py`."""
    config = LlamaConfig(hidden_size=16, ffn_size=24, num_heads=4, num_kv_heads=2, head_size=6)
    for tp, sharded, regather in product((1, 2, 4), (False, True), (False, True)):
        plan = lab.Plan(tp=tp, sequence_parallel=sharded, precision="float64")
        table = LayerTable(config, plan, replace(LAB, regather=regather), num_rows=2, length=12)
        assert table.layer_bytes == 8 * layer_kept_numbers((2, 12), (16, 24, 4, 2, 6), tp, sharded, regather)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_layers_of_a_stage_keep_what_autograd_keeps(precision):
    plan = lab.Plan(precision=precision)

    def fn(rank, world_size):
        trainer = Trainer(CONFIG, plan, Options(sequence_length=LENGTH, global_batch=1))
        (stage,) = trainer.model.stages.values()
        weights = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters()}
        x, kept = torch.ones(1, LENGTH, CONFIG.hidden_size, dtype=stage.dtype, requires_grad=True), {}

        def pack(saved):
            storage = saved.untyped_storage()
            kept.setdefault(storage.data_ptr(), (saved, storage.nbytes()))
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            for layer in stage.layers:
                x = layer(x, None)
        return sum(size for place, (_, size) in kept.items() if place not in weights)

    (measured,) = lab.launch(fn, 1)
    assert measured == CONFIG.num_layers * LayerTable(CONFIG, plan, LAB, 1, LENGTH).layer_bytes


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_the_peak_has_as_many_activations_as_the_timeline(schedule):
    plan = lab.Plan(pp=4, num_microbatches=8, schedule=schedule)
    even = replace(CONFIG, num_layers=plan.num_stages)  # a layer for each stage, so that all activations weigh the same
    plan = replace(plan, layers=(1,) * plan.num_stages)
    rules = replace(LAB, ids_bytes=0)
    found = planner.estimate(even, plan, cluster(4), LENGTH, 8, rules)
    timeline = lab.simulate(plan.program)
    for rank in range(4):
        peak = found.of(rank).peak
        layers = LayerTable(even, plan, rules, 1, LENGTH).layer_bytes
        num_kept = sum(count for _, count in peak.kept)
        assert num_kept * layers == peak.layers
        has_head = plan.num_stages - 1 in {action.stage for action in plan.program.actions(rank)}
        assert num_kept <= timeline.peak_activations(rank)
        if not has_head:  # with the head, fewer activations may be more bytes
            assert num_kept == timeline.peak_activations(rank)
        assert sum(action.kind == F for action in plan.program.actions(rank)) >= num_kept


def test_the_head_can_make_the_last_rank_the_largest():
    config = LlamaConfig(vocabulary_size=128256, hidden_size=512, ffn_size=1024, num_layers=8, num_heads=8)
    plan = lab.Plan(pp=4, num_microbatches=8, layers=(2, 2, 2, 2), precision="bfloat16")
    found = planner.estimate(config, plan, cluster(4), 4096, 8)
    assert found.largest is found.of(3)
    assert found.largest.peak.logits == 4096 * 128256 * 2
    assert [dict(found.of(rank).peak.kept)[rank] for rank in range(4)] == [4, 3, 2, 1]
    small = planner.estimate(replace(config, vocabulary_size=1024), plan, cluster(4), 4096, 8)
    assert small.largest is small.of(0)


def test_recomputation_keeps_inputs_and_one_layer():
    plan = lab.Plan(num_microbatches=2, recompute=True)
    peak = planner.estimate(CONFIG, plan, cluster(1), LENGTH, 2).of(0).peak
    assert peak.layers == 5 * LENGTH * 8 * 4
    # norms, inputs, norms of heads, queries, keys and values, angles, output, gate and up; its input is already kept
    again = 144 + 128 + 144 + 64 + 64 + 16 + 64 + 160 - 64
    gradients = 64 + 3 * 80 + 80 + 160  # of the layer's output and the network's tensors, the product, one weight
    logits = 8 * 19  # freed by then
    assert (peak.action, peak.working) == ("0B0", 4 * (again + gradients - logits))


def test_every_figure_says_how_far_it_can_be_trusted():
    found = planner.estimate(CONFIG, lab.Plan(dp=2, zero=2), cluster(2), LENGTH, 2).of(1)
    marks = {figure.name: figure.certainty for figure in found.figures}
    assert marks == {
        **dict.fromkeys(("parameters", "gradients", "masters", "moments", "activations"), "exact"),
        **dict.fromkeys(("ends", "logits", "working", "received", "buffers"), "assumed"),
        "reserve": "fitted",
    }
    assert sum(figure.num_bytes for figure in found.figures[:-1]) == found.allocated
    assert found.reserve.least < found.reserve.num_bytes < found.reserve.most
    assert "reserve 2.86 GiB (fitted, 2.84 to 3.81)" in str(found.figures[-1])
    other = planner.estimate(CONFIG, lab.Plan(cp=2), cluster(2), LENGTH, 1).of(0)
    assert other.certainty == "exact"  # what a ring keeps is counted
    split, full = (
        planner.estimate(CONFIG, lab.Plan(pp=2, num_microbatches=4, schedule=name), cluster(2), LENGTH, 4).of(0)
        for name in ("zero_bubble_h1", "1f1b")
    )
    assert (split.certainty, full.certainty) == ("assumed", "exact")  # an I frees some of what is counted to its W


def test_bytes_by_link_are_those_of_the_plan_s_traffic():
    plan = lab.Plan(dp=2, tp=2, zero=1)
    found = planner.estimate(CONFIG, plan, cluster(4, 2), LENGTH, 4).bytes_by_link()
    assert sum(found.values()) == plan.traffic(CONFIG, 4, LENGTH).sent()
    assert found["between"] == plan.traffic(CONFIG, 4, LENGTH).ledger.between_nodes(2) > 0
    assert planner.estimate(CONFIG, plan, cluster(4), LENGTH, 4).bytes_by_link()["between"] == 0


def test_it_prints_a_row_for_ranks_that_are_equal():
    plan = lab.Plan(pp=2, dp=2, tp=2, num_microbatches=4)
    lines = str(planner.estimate(replace(CONFIG, vocabulary_size=20), plan, cluster(8), LENGTH, 8)).splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == ["ranks", "pp 0, tp 0-1", "pp 1, tp 0-1"]


def test_ranks_whose_buffers_alone_differ_have_rows_of_their_own():
    """On tp 4 every second rank has copies of two key heads, which are in buckets of their own."""
    config = replace(V3, vocabulary_size=64, hidden_size=32, ffn_size=48, expert_ffn_size=8, num_experts=8)
    found = planner.estimate(config, lab.Plan(tp=4, ep=2, zero=2), cluster(8), 16, 2, planner.MEGATRON)
    assert len({memory.states for memory in found.places.values()}) == 1
    assert len({memory.buffers for memory in found.places.values()}) == 2
    assert [line.split("  ")[0] for line in str(found).splitlines()[2:]] == ["tp 0 2", "tp 1 3"]


def test_config_fields_of_the_families_are_read_without_torch():
    values = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    }  # fmt: skip
    assert config_from_pretrained(values).num_parameters() == 8_030_261_248
    text = f"""
import sys
from dualpipe_lab.models import config_from_pretrained
from dualpipe_lab.plan import Cluster, GptConfig, Plan, estimate
config = config_from_pretrained({values!r})
estimate(config, Plan(dp=8, zero=1, precision="bfloat16"), Cluster.of("h100", 8), 8192, 8).largest.total
assert not {{"torch", "numpy"}} & set(sys.modules), "an estimate is pure data"
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: planner.Cluster.of("h1000", 8), "there is no 'h1000' in the table, the nearest is h100"),
        (lambda: planner.Cluster.of("h100", 12), "full nodes, got 12 ranks and 8 per node; use 16 ranks"),
        (lambda: planner.Cluster.of("h100", 0), "num_ranks to be an integer of at least 1, got 0"),
        (lambda: planner.LinkClass("rail", -1), "the bandwidth of rail is a number of bytes/s above 0, got -1"),
        (lambda: planner.LinkClass("rail", 1e9, -1.0), "latency of rail is a number of seconds from 0, got -1.0"),
        (lambda: planner.Efficiency(1.5), "above 0 and at most 1, got 1.5"),
        (lambda: planner.Efficiency(0.5, "guessed"), "measured, quoted, assumed, got 'guessed'"),
        (lambda: planner.Accelerator("X", {}, 1, 1), "X needs a peak for a type of number"),
        (lambda: planner.Accelerator("X", {"bfloat16": 1}, 0, 1), "X's memory is a number of bytes above 0, got 0"),
        (lambda: planner.estimate(CONFIG, lab.Plan(tp=2), cluster(4), LENGTH, 1), "for 2 ranks, the world has 4"),
        (lambda: planner.estimate(CONFIG, lab.Plan(dp=2), cluster(2), LENGTH, 3), "use 4"),
        (lambda: planner.estimate(V3, lab.Plan(), cluster(1), LENGTH, 1, imbalance="2"), "got imbalance='2'; use 1"),
        (lambda: planner.estimate(CONFIG, lab.Plan(tp=3), cluster(3), LENGTH, 3), "the nearest plan of 3 ranks"),
        (
            lambda: planner.estimate(CONFIG, lab.Plan(dp=4, ranks_per_node=2), cluster(4), LENGTH, 4),
            "the cluster has 4 ranks per node, got a plan with ranks_per_node=2",
        ),
        (lambda: planner.estimate(CONFIG, lab.Plan(), cluster(1), LENGTH, 1).of(1), "the plan has ranks 0 to 0, got 1"),
        (lambda: planner.GptConfig.from_fields({"n_embd": "768"}), "config.json needs vocab_size as a whole number"),
        (
            lambda: planner.estimate(
                planner.GptConfig(19, 8, 2, 4), lab.Plan(), cluster(1), LENGTH, 1
            ).bytes_by_link(),
            "got a GptConfig",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_what_to_use(make, words):
    with pytest.raises(ValueError, match=r".") as found:
        make()
    assert words in str(found.value)
