"""Settings of other frameworks have names and choices of those frameworks' own parsers."""

import json
import re

import pytest
from export_plans import CHECKS, FRAMEWORKS, NAMES, check_megatron, export, plans
from hypothesis import given, settings

from dualpipe_lab.plan import Plan, model_of

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
