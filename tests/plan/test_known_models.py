"""Published models: their sizes give the published numbers, and what is not known is told with its nearest."""

import json
import re
from decimal import Decimal

import pytest

from dualpipe_lab.models import config_from_pretrained
from dualpipe_lab.models.pretrained.config import FAMILIES
from dualpipe_lab.plan import Plan, known_models, model_of
from dualpipe_lab.plan.parameters import parts_of

KNOWN_MODELS = known_models()

# exact numbers of the tensors in the published files, where those are known
EXACT = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}


def printed(number, as_):
    """A number with as many digits as a printed one has, such as 8.03e9."""
    digits = as_.partition("e")[0]
    places = len(digits.partition(".")[2])
    return f"{round(Decimal(number) / 10**9, places)}e9"


def test_a_known_model_has_a_source_its_published_numbers_and_a_place_on_a_plan(tmp_path, subtests):
    """As the reader of folders gives it; and every one can be cut into two stages with two ranks along tp."""
    plan = Plan(pp=2, dp=2, tp=2, zero=1, num_microbatches=4, precision="bfloat16")
    for name, known in KNOWN_MODELS.items():
        with subtests.test(name=name):
            model = model_of(name)
            held = parts_of(Plan(), model, 0)  # without biases of a router's selection
            numel = sum(part.numel for part in held)
            assert printed(numel, known.published) == known.published
            assert numel == EXACT.get(name, numel)
            assert len(known.source) > 20
            (tmp_path / "config.json").write_text(json.dumps(known.values))
            read = config_from_pretrained(known.values)
            assert model == read == model_of(tmp_path) == model_of(tmp_path / "config.json")
            plan.check(model, sequence_length=4096)
    assert KNOWN_MODELS.keys() >= EXACT.keys()
    assert {known.values["architectures"][0] for known in KNOWN_MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize(
    ("name", "nearest"),
    {
        "llama-3-8b": "llama3-8b",
        "meta-llama/Meta-Llama-3-70B-Instruct": "llama3-70b",
        "Llama-3.1-405B": "llama3.1-405b",
        "Qwen/Qwen3-30B": "qwen3-30b-a3b",
        "DeepSeek-V2": "deepseek-v3",
    }.items(),
)
def test_an_unknown_name_is_told_with_the_nearest(name, nearest):
    message = f"no model and no folder is called '{name}'; the nearest known model is {nearest}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        model_of(name)


@pytest.mark.parametrize("wrong", [["Qwen2MoeForCausalLM"], [], "LlamaForCausalLM", [3], None])
def test_an_unknown_architecture_is_told_with_those_that_are_read(wrong):
    with pytest.raises(ValueError, match=r"one architecture of LlamaForCausalLM, .* got architectures="):
        model_of({"architectures": wrong})
