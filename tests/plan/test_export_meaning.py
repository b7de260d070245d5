"""Settings of other frameworks mean what the plan and the model mean: ranks, sequences, layers, sizes."""

import re
import shlex
from dataclasses import replace
from math import prod

import pytest
from export_plans import LENGTH, V3, arguments_of, export, plans
from hypothesis import given, settings

from dualpipe_lab.plan import MEGATRON, Cluster, Plan, estimate, exports, model_of


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


def test_megatron_s_experts_are_those_of_its_rules_of_memory():
    """By `estimate` a rank holds the experts that the size of ep in the command leaves it."""
    config = replace(V3, expert_ffn_size=64)
    for plan in (Plan(tp=2, ep=2, sequence_parallel=True), Plan(tp=4, dp=4, ep=4, experts_in_data=True), Plan(dp=2)):
        ranks = int(arguments_of(export("megatron", plan, config).settings)["--expert-model-parallel-size"][0])
        cluster, batch = Cluster.of("h100", plan.world_size), plan.data_size
        held, none = (
            estimate(one, plan, cluster, LENGTH, batch, MEGATRON).of(0).states.num_parameters
            for one in (config, replace(config, expert_ffn_size=32))
        )
        num_layers = config.num_layers - config.num_dense_layers
        shared = config.num_shared_experts / plan.tp
        experts = (held - none) / num_layers / (config.expert_parameters / 2)
        assert experts == config.num_experts / ranks + shared, plan
    odd = arguments_of(export("megatron", Plan(tp=4, ep=8, sequence_parallel=True), config).settings)
    assert odd["--expert-model-parallel-size"] == ["8"], "16 experts do not divide among 32 ranks"


def test_text_of_arguments_is_read_by_a_shell_as_it_was():
    plan = Plan(pp=2, dp=2, num_microbatches=4, layers=(8, 9), multi_token=0.3)
    found = export("megatron", plan, V3)
    text = str(replace(found, missing=()))
    assert "'Et*8|t*9mL'" in text
    assert shlex.split(text) == found.settings
