"""Plans in the settings of other frameworks: names and choices that their parsers have, and nothing left out silently.

`framework_names.json` has the names that each framework's own parser accepts at one commit, which it names.
"""

import ast
import json
import re
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpipe_lab.models import LlamaConfig, V3MoEConfig
from dualpipe_lab.plan import GptConfig, Plan, exports, model_of
from dualpipe_lab.pp import schedules

NAMES = json.loads((Path(__file__).parent / "framework_names.json").read_text())
FRAMEWORKS = ("megatron", "torchtitan", "deepspeed")
LLAMA = LlamaConfig(num_layers=16, num_heads=8, num_kv_heads=4)
V3 = V3MoEConfig(num_layers=17, num_heads=8, num_kv_heads=4, num_experts=16)
LENGTH = 64


def export(framework, plan, model, rows=2):
    batch = rows * plan.data_size * plan.num_microbatches
    return getattr(exports, framework)(plan, model, LENGTH, batch)


def arguments_of(command):
    """Argument -> its values."""
    found = {}
    for word in command:
        if re.match(r"--[a-z]", word):
            assert word not in found, f"{word} twice"
            found[word] = []
            last = word
        else:
            found[last].append(word)
    return found


# --- plans


FIELDS = {
    "pp": st.sampled_from([1, 2, 4]),
    "dp": st.sampled_from([1, 2, 4]),
    "cp": st.sampled_from([1, 2]),
    "tp": st.sampled_from([1, 2, 4]),
    "ep": st.sampled_from([1, 2, 4]),
    "num_microbatches": st.sampled_from([1, 2, 8]),
    "schedule": st.sampled_from([*schedules.names(synchronous=True)]),
    "chunks": st.sampled_from([None, 2]),
    "zero": st.sampled_from([0, 1, 2, 3]),
    "hybrid": st.booleans(),
    "experts_in_data": st.booleans(),
    "sequence_parallel": st.booleans(),
    "layout": st.sampled_from(["zigzag", "contiguous", "striped"]),
    "recompute": st.booleans(),
    "precision": st.sampled_from(["bfloat16", "float32", "float64"]),
    "overlap": st.booleans(),
    "order": st.permutations(["pp", "dp", "ep", "cp", "tp"]).map(tuple),
    "ranks_per_node": st.sampled_from([None, 2, 4]),
    "loss_chunk": st.sampled_from([None, 16]),
    "multi_token": st.sampled_from([None, 0.3]),
}


@st.composite
def plans(draw):
    """A legal plan of a model: drawn fields, where they do not fit the nearest plan that does."""
    model = draw(st.sampled_from([LLAMA, V3]))
    drawn = Plan(**{name: draw(values) for name, values in FIELDS.items()})
    found = drawn.nearest(model, LENGTH)
    return model, Plan(dp=2) if found is None else found


# --- names and choices of the frameworks' own parsers


def check_megatron(command):
    accepted = NAMES["megatron"]["arguments"]
    for name, values in arguments_of(command).items():
        assert name in accepted, f"Megatron-LM has no {name}"
        rule = accepted[name]
        assert len(values) == rule["values"] or (rule["values"] == "+" and values), (name, values)
        for value in values:
            {"int": int, "float": float}.get(rule.get("kind"), str)(value)
            assert value in map(str, rule.get("choices", [value])), (name, value)


KINDS = {"int": int, "bool": bool, "str": str, "None": type(None), "float": float, "list[list[str]]": list}


def is_of(value, annotation):
    """Whether a value is of an annotation, such as `int | None` or `Literal['never', 'always']`."""
    if annotation.startswith("Literal["):
        return value in ast.literal_eval(annotation.removeprefix("Literal"))
    return type(value) in [KINDS[kind.strip()] for kind in annotation.split("|")]


def check_torchtitan(values):
    from torch.distributed.pipelining.schedules import get_schedule_class

    names = NAMES["torchtitan"]
    assert set(values) == {"parallelism", "training", "activation_checkpoint", "loss"}
    for section in ("parallelism", "training"):
        for name, value in values[section].items():
            assert name in names[section], f"torchtitan has no {section}.{name}"
            assert is_of(value, names[section][name]), (name, value)
    get_schedule_class(values["parallelism"].get("pipeline_parallel_schedule", "1F1B"))  # ValueError for no name of its
    balancer = values["parallelism"].get("context_parallel_load_balancer")
    assert balancer in names["context_parallel_load_balancer"]
    for section in ("activation_checkpoint", "loss"):
        component = dict(values[section] or {"component": next(iter(names[section]))})
        fields = names[section][component.pop("component")]
        assert all(is_of(value, fields[name]) for name, value in component.items())


def check_deepspeed(values):
    names = NAMES["deepspeed"]
    assert set(values) <= set(names["top"])
    for section, found in values.items():
        if isinstance(found, dict):
            assert set(found) <= set(names[section]), section
    assert values["zero_optimization"]["stage"] in range(4)
    assert values.get("data_types", {}).get("grad_accum_dtype", "fp32") in ("fp32", "fp16", "bf16")


CHECKS = {"megatron": check_megatron, "torchtitan": check_torchtitan, "deepspeed": check_deepspeed}
SAMPLES = [
    ("llama3-8b", Plan(dp=8, zero=3, precision="bfloat16")),
    ("llama3.1-405b", Plan(pp=16, tp=8, dp=2, zero=1, num_microbatches=16, sequence_parallel=True)),
    ("llama3.2-3b", Plan(tp=2, cp=2, dp=2, recompute=True)),
    ("qwen3-8b", Plan(dp=16, zero=3, hybrid=True, ranks_per_node=8)),
    ("qwen3-235b-a22b", Plan(pp=2, ep=8, tp=2, dp=2, num_microbatches=4, zero=1, sequence_parallel=True)),
    ("mixtral-8x7b", Plan(dp=8, ep=8, experts_in_data=True, zero=2, precision="bfloat16")),
    ("deepseek-v3", Plan(pp=16, dp=64, ep=64, experts_in_data=True, zero=1, num_microbatches=16, multi_token=0.1)),
    ("gpt3-175b", Plan(pp=8, tp=8, schedule="interleaved", chunks=3, num_microbatches=8)),
]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("name", "plan"), SAMPLES, ids=[name for name, _ in SAMPLES])
def test_published_models_have_names_and_choices_of_the_parser(framework, name, plan):
    CHECKS[framework](export(framework, plan, model_of(name), rows=1).settings)


@settings(max_examples=30, deadline=None)
@given(plans())
def test_any_plan_has_names_and_choices_of_the_parsers(drawn):
    model, plan = drawn
    for framework in FRAMEWORKS:
        found = export(framework, plan, model)
        CHECKS[framework](found.settings)
        assert json.loads(json.dumps(found.settings)) == found.settings
        assert found.is_complete == (found.missing == ())


def test_a_name_that_no_parser_has_is_seen():
    with pytest.raises(AssertionError, match="has no --dualpipe"):
        check_megatron(["--dualpipe"])
    with pytest.raises(AssertionError):
        check_megatron(["--recompute-granularity", "half"])
    with pytest.raises(ValueError, match="invalid literal"):
        check_megatron(["--tensor-model-parallel-size", "two"])


def test_the_file_of_names_says_where_they_are_from():
    for framework in FRAMEWORKS:
        assert re.fullmatch(r"[0-9a-f]{40}", NAMES[framework]["commit"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", NAMES[framework]["date"])
        module = __import__(f"dualpipe_lab.plan.exports.{framework}", fromlist=["_"])
        first = module.__doc__.partition("\n")[0]
        assert NAMES[framework]["commit"][:8] in first
        assert NAMES[framework]["date"] in first


# --- what the values mean


@settings(max_examples=30, deadline=None)
@given(plans())
def test_ranks_and_sequences_are_those_of_the_plan(drawn):
    model, plan = drawn
    batch = 2 * plan.data_size * plan.num_microbatches
    command = arguments_of(export("megatron", plan, model).settings)
    sizes = [int(command[f"--{axis}-parallel-size"][0]) for axis in ("tensor-model", "pipeline-model", "context")]
    assert sizes == [plan.tp, plan.pp, plan.cp]
    data = plan.world_size // (plan.tp * plan.pp * plan.cp)
    micro, step = (int(command[f"--{kind}-batch-size"][0]) for kind in ("micro", "global"))
    assert (step, step // (micro * data)) == (batch, plan.num_microbatches)
    assert plan.world_size // plan.pp % int(command.get("--expert-model-parallel-size", ["1"])[0]) == 0
    values = export("torchtitan", plan, model).settings
    degrees = values["parallelism"]
    axes = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "context_parallel")
    product = prod(degrees.get(f"{axis}_degree", 1) for axis in (*axes, "pipeline_parallel"))
    assert product == plan.world_size
    sharing = degrees["data_parallel_shard_degree"] * plan.cp * plan.tp
    assert sharing % degrees.get("expert_parallel_degree", 1) == 0
    training = values["training"]
    assert training["num_tokens_per_train_step"] == batch * LENGTH
    assert training["num_tokens_per_microbatch_per_dp_rank"] == 2 * LENGTH
    found = export("deepspeed", plan, model).settings
    accumulated = found["train_micro_batch_size_per_gpu"] * found["gradient_accumulation_steps"]
    assert found["train_batch_size"] == accumulated * plan.data_size == batch


def layers_of_layout(text):
    """Stages of Megatron's letters, each as its letters one by one."""
    text = re.sub(r"(.)\*(\d+)", lambda found: found[1] * int(found[2]), text)
    return text.split("|")


@settings(max_examples=30, deadline=None)
@given(plans())
def test_stages_have_the_layers_of_the_plan(drawn):
    model, plan = drawn
    counts = [len(layers) for layers in plan.stage_layers(model)]
    command = arguments_of(export("megatron", plan, model).settings)
    if "--pipeline-model-parallel-layout" in command:
        stages = layers_of_layout(command["--pipeline-model-parallel-layout"][0])
        assert [stage.count("t") for stage in stages] == counts
        assert stages[0][0] == "E"
        assert stages[-1].endswith("mL" if "--mtp-num-layers" in command else "L")
        assert len(stages) % plan.pp == 0
    elif plan.pp > 1 and plan.schedule in ("1f1b", "interleaved"):
        assert len(set(counts)) == 1
        chunks = int(command.get("--num-virtual-stages-per-pipeline-rank", ["1"])[0])
        assert chunks * plan.pp == plan.num_stages
    stages = export("torchtitan", plan, model).settings["parallelism"].get("module_fqns_per_model_part")
    if stages is not None:
        assert [sum(name.startswith("layers.") for name in stage) for stage in stages] == counts
        order = [name for stage in stages for name in stage]
        assert order == ["tok_embeddings", *(f"layers.{i}" for i in range(model.num_layers)), "norm", "lm_head"]


@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
def test_interleaving_of_one_stage_per_rank_is_told(framework):
    """Both frameworks run it as 1F1B or refuse it, and it is another program, with more forwards before the first B."""
    one = Plan(pp=4, schedule="interleaved", chunks=1, num_microbatches=8)
    assert one.program.ranks != replace(one, schedule="1f1b", chunks=None).program.ranks
    found = export(framework, one, LLAMA)
    assert found.missing[0].startswith("schedule interleaved with one stage per rank")
    assert "pipeline_parallel_schedule" not in str(found.settings)


# --- nothing is left out silently

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


# --- models in Megatron's words

SIZES = {
    "llama3-8b": "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-query-groups 8 --kv-channels 128 "
    "--rotary-base 500000 --vocab-size 128256",
    "llama3.1-70b": "--use-rope-scaling --rope-scaling-factor 8.0",
    "qwen3-30b-a3b": "--num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8 --qk-layernorm "
    "--moe-router-score-function softmax",
    "mixtral-8x7b": "--num-experts 8 --moe-ffn-hidden-size 14336 --moe-router-topk 2",
    "deepseek-v3": "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128 --moe-layer-freq ([0]*3+[1]*58) --moe-router-num-groups 8 "
    "--moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias "
    "--moe-shared-expert-intermediate-size 2048 --moe-router-score-function sigmoid --rope-type yarn "
    "--rotary-scaling-factor 40.0 --mscale 1.0 --mscale-all-dim 1.0",
    "gpt3-175b": "--num-layers 96 --hidden-size 12288 --ffn-hidden-size 49152 --position-embedding-type "
    "learned_absolute --max-position-embeddings 2048",
}


@pytest.mark.parametrize("name", SIZES)
def test_a_model_has_its_sizes_in_megatrons_words(name):
    found = exports.megatron(Plan(dp=2), model_of(name), 2048, 2)
    command, wanted = arguments_of(found.settings), arguments_of(SIZES[name].split())
    assert {argument: command.get(argument) for argument in wanted} == wanted
    assert found.is_complete


def test_only_a_gpt_has_biases_and_a_tied_table_there():
    models = [model_of(name) for name in ("gpt3-175b", "llama3-8b")]
    gpt, llama = (arguments_of(export("megatron", Plan(), model).settings) for model in models)
    for argument in ("--disable-bias-linear", "--swiglu", "--untie-embeddings-and-output-weights"):
        assert argument in llama
        assert argument not in gpt
    assert gpt["--attention-dropout"] == llama["--hidden-dropout"] == ["0.0"]


def test_what_megatron_computes_otherwise_is_told():
    uneven = exports.megatron(Plan(tp=8), model_of("gpt3-175b"), 2048, 1)
    assert uneven.missing == ("a table of 50257 rows over tp 8: it has 50264 rows there",)
    odd = replace(V3, normalise=False)
    assert any("sigmoid weights" in each for each in export("megatron", Plan(dp=2), odd).missing)
    soft = replace(V3, scoring="softmax", selection_bias=False, num_groups=1, num_groups_per_token=1, normalise=False)
    assert "--moe-router-pre-softmax" in export("megatron", Plan(dp=2), soft).settings


# --- refusals, and this library's own form


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_does_not_fit_is_refused(framework):
    with pytest.raises(ValueError, match="num_heads must divide"):
        getattr(exports, framework)(Plan(tp=3), LLAMA, LENGTH, 1)
    with pytest.raises(ValueError, match=r"divide among 4 data ranks x 2 microbatches, got 12; use 16"):
        getattr(exports, framework)(Plan(dp=4, num_microbatches=2), LLAMA, LENGTH, 12)
    with pytest.raises(ValueError, match="has none, got ep 2"):
        getattr(exports, framework)(Plan(ep=2), GptConfig(512, 64, 2, 4), LENGTH, 2)


@settings(max_examples=40, deadline=None)
@given(plans())
def test_a_plan_comes_back_from_its_values(drawn):
    _, plan = drawn
    values = json.loads(json.dumps(exports.lab(plan).settings))
    assert Plan(**values) == Plan.from_description(values) == plan


def test_the_trainer_takes_a_plan_from_its_values():
    from dualpipe_lab import train

    values = json.loads(json.dumps(exports.lab(Plan(dp=2, zero=1, num_microbatches=2)).settings))
    options = {"steps": 2, "sequence_length": 16, "global_batch": 4, "log_every": 0}
    text = bytes(range(97, 123)) * 40
    result = train.run(LlamaConfig(), Plan(**values), text, **options)
    assert len(result.metrics) == 2
