"""Memory: states equal what the trainer holds, byte for byte; tables and peaks are those of the library."""

import random
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_runs import CONFIG, LENGTH, V3

import dualpipe_lab as lab
from dualpipe_lab import plan as planner
from dualpipe_lab.dp.measure import storage_bytes
from dualpipe_lab.models import LlamaConfig
from dualpipe_lab.plan.memory import kept_counts, model_states
from dualpipe_lab.plan.saved_activations import LayerTable
from dualpipe_lab.pp.program import F
from dualpipe_lab.tp.closed_forms import layer_kept_numbers
from dualpipe_lab.train import Batch, Trainer, TrainOptions

SYNCHRONOUS = lab.schedules.names(synchronous=True)
PRECISIONS = ("float64", "float32", "bfloat16")


def held(trainer):
    """Bytes of parameters, gradients, master weights and moments that a rank's tensors have."""
    optimizer, zero = trainer.optimizer, trainer.plan.zero
    adams = [shard.optimizer for shard in optimizer.local_shards]
    if zero == 3:
        weights, gradients = ([getattr(flat, name) for flat in optimizer.flats] for name in ("shard", "grad"))
    else:
        weights = list(trainer.model.parameters())
        gradients = optimizer.reducer.shards if zero == 2 else [parameter.grad for parameter in weights]
    masters = [adam.weight for adam in adams if adam.weight is not adam.working]
    moments = [tensor for adam in adams for tensor in (adam.state["exp_avg"], adam.state["exp_avg_sq"])]
    return tuple(map(storage_bytes, (weights, gradients, masters, moments)))


def train(plan, config):
    """In a rank: what it holds behind a step."""
    num_rows = plan.data_size * plan.num_microbatches
    trainer = Trainer(config, plan, TrainOptions(sequence_length=LENGTH, global_batch=num_rows))
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
            states = model_states(config, plan, here.get("pp", 0), here.get("tp", 0))
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
    experts.append(lab.Plan(dp=2, ep=2, experts_in_data=True, zero=2, mtp=0.3))
    cases = [(plan, CONFIG) for plan in data + others] + [(plan, replace(CONFIG, tied=True)) for plan in tied]
    cases += [(plan, V3) for plan in experts]
    assert_held([(plan, CONFIG) for plan in every_stage] + some(cases, 7))


def test_four_ranks_hold_the_bytes_of_the_estimate():
    dense = [
        lab.Plan(dp=4, zero=1, precision="bfloat16"),
        lab.Plan(dp=4, zero=3, hybrid=True, ranks_per_node=2),
        lab.Plan(tp=4),  # more ranks than KV heads, and an uneven vocabulary
        lab.Plan(pp=2, dp=2, num_microbatches=4, schedule="dualpipe", zero=2, layers=(4, 1)),
        lab.Plan(pp=2, tp=2, num_microbatches=4, schedule="interleaved", chunks=2),
    ]
    experts = [lab.Plan(dp=4, ep=2, experts_in_data=True, zero=1), lab.Plan(pp=2, ep=2, num_microbatches=4, zero=3)]
    assert_held([(plan, CONFIG) for plan in dense] + [(plan, V3) for plan in experts])


def test_states_of_many_plans_are_those_of_the_flat_buffers_that_messages_are_counted_for():
    """The counts of `Plan.traffic` are exact, and a gather of weights moves the shards of the states."""
    for zero, dp in product((1, 2), (2, 3, 4)):
        plan = lab.Plan(dp=dp, zero=zero, precision="bfloat16")
        gathered = plan.traffic(CONFIG, dp, LENGTH).calls(0)["all_gather_single"][1]
        assert gathered == model_states(CONFIG, plan).parameters // dp * (dp - 1)


def test_a_layer_keeps_what_the_closed_form_says():
    """That form is held against what autograd keeps, in `tests/tp/test_tp_overlap.py`."""
    config = LlamaConfig(hidden_size=16, ffn_size=24, num_heads=4, num_kv_heads=2, head_size=6)
    for tp, sharded in product((1, 2, 4), (False, True)):
        plan = lab.Plan(tp=tp, sequence_parallel=sharded, precision="float64")
        table = LayerTable(config, plan, num_rows=2, length=12)
        assert table.layer_bytes == 8 * layer_kept_numbers((2, 12), (16, 24, 4, 2, 6), tp, sharded, regather=True)


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_the_peak_has_as_many_activations_as_the_timeline(schedule):
    plan = lab.Plan(pp=4, num_microbatches=8, schedule=schedule)
    even = replace(CONFIG, num_layers=plan.num_stages)  # a layer for each stage, so that all activations weigh the same
    plan = replace(plan, layers=(1,) * plan.num_stages)
    found = planner.memory(even, plan, LENGTH, 8)
    timeline, table = lab.simulate(plan.program), LayerTable(even, plan, 1, LENGTH)
    ids, last = (sum(end.values()) - end.get("logits", 0) for end in (table.first(), table.last()))
    for rank in range(4):
        one, kept = found.of(rank), dict(found.of(rank).kept)
        num_kept = sum(kept.values())
        ends = kept.get(0, 0) * ids + kept.get(plan.num_stages - 1, 0) * last
        assert one.activations == num_kept * table.layer_bytes + ends
        assert num_kept <= timeline.peak_activations(rank)
        if not {0, plan.num_stages - 1} & {*plan.program.stages_of(rank)}:
            assert num_kept == timeline.peak_activations(rank)  # with an end, fewer activations may be more bytes
        assert sum(action.kind == F for action in plan.program.actions(rank)) >= num_kept


def walk(plan, pp_rank, kept_bytes, working):
    """The first of the largest peaks: bytes of the kept activations and of the action."""
    kept, best = Counter(), (-1, None)
    for action in plan.program.actions(pp_rank):
        kept[action.stage] += action.kind == "F"
        total = sum(count * kept_bytes[stage] for stage, count in kept.items()) + working[action.stage, action.kind]
        best = max(best, (total, str(action)), key=lambda one: one[0])
        kept[action.stage] -= action.kind in ("B", "W")
    return best


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize(("pp", "num_microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_the_peak_is_among_the_moments_whatever_a_stage_weighs(name, pp, num_microbatches):
    plan, draw = lab.Plan(pp=pp, schedule=name, num_microbatches=num_microbatches), random.Random(pp)
    for pp_rank in range(pp):
        moments = kept_counts(plan, pp_rank)
        assert len(moments) < len(list(plan.program.actions(pp_rank)))
        for _ in range(20):
            stages = range(plan.num_stages)
            kept_bytes = {stage: draw.randrange(1, 100) for stage in stages}
            working = {(stage, kind): draw.randrange(0, 300) for stage in stages for kind in "FBIW"}
            found = (-1, None)
            for action, kept in moments:
                total = sum(count * kept_bytes[stage] for stage, count in kept) + working[action.stage, action.kind]
                found = max(found, (total, str(action)), key=lambda one: one[0])
            assert found == walk(plan, pp_rank, kept_bytes, working)


def test_the_head_can_make_the_last_rank_the_largest():
    config = LlamaConfig(vocabulary_size=128256, hidden_size=512, ffn_size=1024, num_layers=8, num_heads=8)
    plan = lab.Plan(pp=4, num_microbatches=8, layers=(2, 2, 2, 2), precision="bfloat16")
    found = planner.memory(config, plan, 4096, 8)
    assert found.largest is found.of(3)
    assert found.largest.logits == 4096 * 128256 * 2
    assert [dict(found.of(rank).kept)[rank] for rank in range(4)] == [4, 3, 2, 1]
    small = planner.memory(replace(config, vocabulary_size=1024), plan, 4096, 8)
    assert small.largest is small.of(0)


def test_recomputation_keeps_inputs_and_one_layer():
    plan = lab.Plan(num_microbatches=2, recompute=True)
    one = planner.memory(CONFIG, plan, LENGTH, 2).of(0)
    ends = LENGTH * (16 + 2 * 8 * 4 + 4)  # ids, the inputs of last norm and head, a scale
    assert one.activations == 5 * LENGTH * 8 * 4 + ends
    # norms, inputs, norms of heads, queries, keys and values, angles, output, gate and up; its input is already kept
    again = 144 + 128 + 144 + 64 + 64 + 16 + 64 + 160 - 64
    gradients = 64 + 3 * 80 + 80 + 160  # of the layer's output and the network's tensors, the product, one weight
    logits = 8 * 19  # freed by then
    assert (one.peak_action, one.working) == ("0B0", 4 * (again + gradients - logits))
    head = 8 * 19 + 19 * 8 + 2 * 8 * 8  # gradients of logits and weight; the head's input and its gradient
    assert LayerTable(CONFIG, plan, 1, LENGTH).head_bytes == 4 * head


@given(
    st.sampled_from([CONFIG, V3, replace(CONFIG, num_layers=8)]),
    st.sampled_from([{}, {"dp": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"pp": 4}, {"pp": 2, "dp": 2, "tp": 2}]),
    st.sampled_from(SYNCHRONOUS), st.sampled_from((0, 1, 2, 3)), st.booleans(), st.sampled_from(PRECISIONS),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_the_parts_of_every_rank_add_up(config, sizes, schedule, zero, recompute, precision):
    plan = lab.Plan(**sizes, schedule=schedule, zero=zero, recompute=recompute, precision=precision, num_microbatches=8)
    try:
        found = planner.memory(config, plan, LENGTH, 8 * plan.data_size)
    except ValueError:
        return  # a plan that is not legal
    for one in found.ranks:
        parts = (one.states.total, one.activations, one.logits, one.working, one.buffers)
        assert one.total == sum(parts)
        assert min(parts) >= 0 < one.states.total
        assert one.total <= found.largest.total
    assert found.fits(found.largest.total)
    assert not found.fits(found.largest.total - 1)


def test_ranks_whose_buffers_alone_differ_have_rows_of_their_own():
    """On tp 4 every second rank has copies of two KV heads, which are in buckets of their own."""
    config = LlamaConfig(vocabulary_size=64, hidden_size=32, ffn_size=48, num_layers=1, num_heads=4, num_kv_heads=2)
    found = planner.memory(config, lab.Plan(dp=2, tp=4, zero=2), 16, 2)
    assert len({memory.states for memory in found.places.values()}) == 1
    assert len({memory.buffers for memory in found.places.values()}) == 2
    assert [line.split("  ")[0] for line in str(found).splitlines()[2:]] == ["tp 0 2", "tp 1 3"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: planner.memory(CONFIG, lab.Plan(dp=2), LENGTH, 3), "use 4"),
        (lambda: planner.memory(CONFIG, lab.Plan(tp=3), LENGTH, 3), "the nearest plan of 3 ranks"),
        (lambda: planner.memory(CONFIG, lab.Plan(), LENGTH, 1).of(1), "the plan has ranks 0 to 0, got 1"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_what_to_use(make, words):
    with pytest.raises(ValueError, match=r".") as found:
        make()
    assert words in str(found.value)
