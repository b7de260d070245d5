"""Settings of other frameworks have names and choices of those frameworks' own parsers."""

import json
import re
import shlex
from dataclasses import replace

import pytest
from export_plans import CHECKS, FRAMEWORKS, NAMES, check_megatron, export, plans
from hypothesis import given, settings

from dualpipe_lab.models import LlamaConfig, V3MoEConfig
from dualpipe_lab.plan import Cluster, LinkClass, Plan, exports, model_of
from dualpipe_lab.plan.planner import search
from dualpipe_lab.topology import AXES

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
        assert found.is_complete != (f"\nno setting of {found.framework}: " in str(found))


SEARCHED = {
    "Llama": LlamaConfig(32000, 2048, 5632, 16, 16, 4),
    "experts": V3MoEConfig(
        vocabulary_size=32000, hidden_size=1024, ffn_size=2816, num_layers=6, num_heads=16, num_kv_heads=4,
        expert_ffn_size=512, num_experts=16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEARCHED)
def test_plans_that_a_search_returns_are_read_by_the_parsers(name):
    """Nodes of two ranks with slow links between them: its choices have every axis."""
    model, cluster = SEARCHED[name], Cluster.of("h100", 8, 2)
    cluster = replace(cluster, between=LinkClass("slow", 1e9, 1e-4))
    few = {"count": 1, "schedule_names": ["1f1b"], "zeros": [1], "recompute": [False]}
    found = [choice.plan for choice in search(model, cluster, 2048, 16, **few).choices[::3]]
    sizes = {axis for plan in found for axis in AXES if getattr(plan, axis) > 1}
    assert sizes == {"pp", "dp", "cp", "tp"} | ({"ep"} if name == "experts" else set())
    for plan in found:
        for framework in FRAMEWORKS:
            CHECKS[framework](getattr(exports, framework)(plan, model, 2048, 16).settings)
        text = str(replace(exports.megatron(plan, model, 2048, 16), missing=()))
        check_megatron(shlex.split(text))


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
