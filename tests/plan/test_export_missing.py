"""Nothing is left out silently: what a framework has no setting for is told."""

import json
from dataclasses import replace

import pytest
from export_plans import FRAMEWORKS, LENGTH, LLAMA, V3, export

from dualpipe_lab.plan import Plan
from dualpipe_lab.pp import schedules

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
