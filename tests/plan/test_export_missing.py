"""Nothing is left out silently: what a framework has no setting for is told."""

import json
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
from export_plans import FRAMEWORKS, LENGTH, LLAMA, V3, arguments_of, export
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from dualpipe_lab.plan import Plan, exports
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.schedules.looped import round_sizes

BASE = Plan(dp=4, tp=2, pp=2, num_microbatches=8, zero=1, ranks_per_node=4)
CHANGES = {
    "pp": replace(BASE, pp=4),
    "cp": replace(BASE, cp=2),
    "tp": replace(BASE, tp=1),
    "num_microbatches": replace(BASE, num_microbatches=4),
    "chunks": replace(BASE, schedule="interleaved", chunks=2),
    "zero": replace(BASE, zero=0),
    "zero 2": replace(BASE, zero=2),
    "zero 3": replace(BASE, zero=3),
    "hybrid": replace(BASE, hybrid=True),
    "hybrid 3": replace(BASE, zero=3, hybrid=True),
    "ep": replace(BASE, ep=2),
    "sequence_parallel": replace(BASE, sequence_parallel=True),
    "recompute": replace(BASE, recompute=True),
    "bfloat16": replace(BASE, precision="bfloat16"),
    "float64": replace(BASE, precision="float64"),
    "layers": replace(BASE, layers=(8, 9)),
    "order": replace(BASE, order=("dp", "ep", "pp", "cp", "tp")),
    "strange order": replace(BASE, order=("tp", "dp", "ep", "cp", "pp")),
    "loss_chunk": replace(BASE, loss_chunk=16),
    "multi_token": replace(BASE, multi_token=0.3),
    "overlap": replace(BASE, schedule="paired_1f1b", overlap=True),
} | {name: replace(BASE, schedule=name) for name in schedules.names(synchronous=True) if name != "1f1b"}
UNHEARD = {("deepspeed", "layers")}  # of a pipeline that is in the program anyway, which the export says


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_plan_changes_the_settings_or_is_told(framework, name):
    if (framework, name) in UNHEARD:
        return
    changed = CHANGES[name]
    changed.check(V3, LENGTH)
    before, after = export(framework, BASE, V3), export(framework, changed, V3)
    assert (before.settings, before.missing) != (after.settings, after.missing)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_a_layout_of_cp_is_set_or_told(framework, layout):
    found = export(framework, Plan(cp=2, dp=2, layout=layout), LLAMA)
    told = any(layout in each or "cp 2" in each for each in found.missing)
    as_set = {"zigzag": ("megatron", "torchtitan"), "contiguous": ("torchtitan",), "striped": ()}
    assert told == (framework not in as_set[layout])


TORCH = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "zbv": "ZBVZeroBubble",
}
KNOWN_SCHEDULES = {
    "megatron": {"1f1b", "interleaved"},
    "torchtitan": {"gpipe", "1f1b", "interleaved", "looped_bfs", "zbv", "dualpipev"},
    "deepspeed": {"1f1b"},
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", schedules.names(synchronous=True))
def test_a_schedule_that_a_framework_lacks_is_told(framework, name):
    chunks = 2 if name in ("interleaved", "looped_bfs") else None
    found = export(framework, Plan(pp=2, schedule=name, chunks=chunks, num_microbatches=4), LLAMA)
    told = any(each.startswith(f"schedule {name}") for each in found.missing)
    assert told == (name not in KNOWN_SCHEDULES[framework])


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("pp", [1, 2])
def test_recompute_is_set_or_told(framework, pp):
    found = export(framework, Plan(pp=pp, dp=2, num_microbatches=4, recompute=True), LLAMA)
    told = any(each.startswith("recompute") for each in found.missing)
    assert told == (framework == "deepspeed" and pp == 1)
    words = {
        "megatron": "--recompute-granularity",
        "torchtitan": "FullAC",
        "deepspeed": "activation_checkpoint_interval",
    }
    assert told or words[framework] in json.dumps(found.settings)


def test_the_missing_is_printed_with_its_framework():
    text = str(export("megatron", Plan(pp=2, schedule="dualpipe", num_microbatches=4), LLAMA))
    assert "\n--pipeline-model-parallel-size 2\n" in text
    assert text.endswith(
        "no setting of Megatron-LM: schedule dualpipe: it runs 1F1B, or interleaved 1F1B with virtual stages"
    )
    assert json.loads(str(export("deepspeed", Plan(dp=2), LLAMA)))["train_batch_size"] == 4


@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
def test_interleaving_of_one_stage_per_rank_is_told(framework):
    """Both frameworks run it as 1F1B or refuse it, and it is another program, with more forwards before the first B."""
    one = Plan(pp=4, schedule="interleaved", chunks=1, num_microbatches=8)
    assert one.program.ranks != replace(one, schedule="1f1b", chunks=None).program.ranks
    found = export(framework, one, LLAMA)
    assert found.missing[0].startswith("schedule interleaved with one stage per rank")
    assert "pipeline_parallel_schedule" not in str(found.settings)


def torch_takes(name, pp, num_microbatches, chunks):
    """Whether torch's schedule of a name is made for so many microbatches, of stages that only have their places."""
    kind, num_stages = get_schedule_class(name), pp * chunks
    places = {
        "num_stages": num_stages,
        "group_size": pp,
        "group_rank": 0,
        "group": None,
        "device": "cpu",
        "submod": None,
    }
    stages = [
        SimpleNamespace(stage_index=index, is_first=index == 0, is_last=index == num_stages - 1, **places)
        for index in range(0, num_stages, pp)
    ]
    try:
        kind(stages[0] if issubclass(kind, PipelineScheduleSingle) else stages, num_microbatches, None)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "looped_bfs", "zbv"])
def test_microbatches_that_torch_refuses_are_told(name):
    """dualpipev has as many of them here as torch asks for."""
    chunks = 1 if name in ("gpipe", "1f1b") else 2
    found = set()
    for pp, num_microbatches in product((2, 3, 4), range(1, 12)):
        free = chunks if name in ("interleaved", "looped_bfs") else None
        plan = Plan(pp=pp, schedule=name, chunks=free, num_microbatches=num_microbatches)
        told = any(each.startswith(f"schedule {name}") for each in export("torchtitan", plan, LLAMA).missing)
        assert told != torch_takes(TORCH[name], pp, num_microbatches, chunks), plan
        found.add(told)
    assert found == ({False, True} if name in ("1f1b", "interleaved") else {False})


def test_rounds_that_megatron_refuses_are_told_and_others_set():
    """Those of `forward_backward_pipelining_with_interleaving`: pp <= group <= M, and M % group is 0, or pp or more."""
    found = set()
    for pp, num_microbatches in product((2, 3, 4), range(1, 24)):
        plan = Plan(pp=pp, schedule="interleaved", chunks=2, num_microbatches=num_microbatches)
        made = export("megatron", plan, LLAMA)
        told = any(each.startswith("schedule interleaved") for each in made.missing)
        words = arguments_of(made.settings).get("--microbatch-group-size-per-virtual-pipeline-stage", [pp])
        size, (full, rest) = int(words[0]), divmod(num_microbatches, int(words[0]))
        rounds = [size] * full + [rest] * (rest > 0)
        runs = pp <= size <= num_microbatches and (rest == 0 or rest >= pp)
        assert told == (not runs or rounds != round_sizes(pp, num_microbatches)), plan
        found.add((told, size > pp))
    assert found == {(True, False), (False, False), (False, True)}


@pytest.mark.parametrize(
    ("framework", "plan", "change", "words"),
    [
        ("torchtitan", Plan(pp=2, num_microbatches=2), {"tied": True}, "a tied table under pp"),
        ("torchtitan", Plan(tp=8), {}, "4 heads of keys on tp 8: it refuses"),
        (
            "torchtitan",
            Plan(cp=3, layout="contiguous"),
            {},
            "microbatches of 128 tokens: it refuses those that 6 parts",
        ),
    ],
)
def test_a_model_that_a_framework_refuses_is_told(framework, plan, change, words):
    assert any(each.startswith(words) for each in export(framework, plan, replace(LLAMA, **change)).missing)
    assert not any(each.startswith(words) for each in export(framework, Plan(dp=plan.world_size), LLAMA).missing)


def test_microbatches_whose_tokens_torchtitan_refuses_are_told():
    """They are shared out among tp under sequence parallelism, and in two chunks for each rank of cp."""
    plans = [Plan(cp=2, layout="contiguous"), Plan(tp=2, cp=2, layout="contiguous", sequence_parallel=True), Plan(tp=4)]
    for plan, parts in zip(plans, (4, 8, 1), strict=True):
        for length in range(60, 69, 4 if plan.sequence_parallel else 1):
            words = f"microbatches of {length} tokens: it refuses those that {parts} parts do not divide"
            assert (words in exports.torchtitan(plan, LLAMA, length, 1).missing) == (length % parts > 0)


def test_deepspeed_s_experts_with_tp_under_pp_are_told():
    words = "ep with tp under pp: it refuses the three together"
    three = Plan(pp=2, tp=2, ep=2, num_microbatches=2)
    assert words in export("deepspeed", three, V3).missing
    for axis in ("pp", "tp", "ep"):
        assert words not in export("deepspeed", replace(three, **{axis: 1}), V3).missing
