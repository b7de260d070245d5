"""Exports: what does not fit is refused, and this library's own form comes back as the plan that it was."""

import json

import pytest
from export_plans import FRAMEWORKS, LENGTH, LLAMA, plans
from hypothesis import given, settings

from dualpipe_lab.models import LlamaConfig
from dualpipe_lab.plan import GptConfig, Plan, exports


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_does_not_fit_is_refused(framework):
    with pytest.raises(ValueError, match="num_heads must divide"):
        getattr(exports, framework)(Plan(tp=3), LLAMA, LENGTH, 1)
    with pytest.raises(ValueError, match=r"divide among 4 data ranks x 2 microbatches, got 12; use 16"):
        getattr(exports, framework)(Plan(dp=4, num_microbatches=2), LLAMA, LENGTH, 12)
    with pytest.raises(ValueError, match="has none, got ep 2"):
        getattr(exports, framework)(Plan(ep=2), GptConfig(512, 64, 2, 4), LENGTH, 2)
    with pytest.raises(ValueError, match=r"learned positions, got 64 tokens and 63; use shorter sequences"):
        getattr(exports, framework)(Plan(), GptConfig(512, 64, 2, 4, num_positions=63), LENGTH, 1)


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
