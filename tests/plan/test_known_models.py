"""Published models: their sizes give the published numbers, and what is not known is told with its nearest."""

import json
import re
from decimal import Decimal

import pytest

from dualpipe_lab.models import LlamaConfig, V3MoEConfig, config_from_pretrained
from dualpipe_lab.models.pretrained.config import FAMILIES
from dualpipe_lab.plan import Plan, known_models, model_of, num_parameters

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


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_a_model_has_the_published_number_of_parameters(name):
    known = KNOWN_MODELS[name]
    assert printed(num_parameters(model_of(name)), known.published) == known.published


@pytest.mark.parametrize("name", EXACT)
def test_a_model_has_as_many_parameters_as_its_files(name):
    assert num_parameters(model_of(name)) == EXACT[name]


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_a_known_model_has_a_source(name):
    known = KNOWN_MODELS[name]
    assert len(known.source) > 20
    json.dumps(known.values)


def test_kinds_of_configs():
    assert isinstance(model_of("llama3-70b"), LlamaConfig)
    assert isinstance(model_of("deepseek-v3"), V3MoEConfig)
    v3 = model_of("deepseek-v3")
    assert (v3.num_experts, v3.num_dense_layers, v3.latent.query_rank, v3.scale) == (256, 3, 1536, 2.5)
    assert model_of("llama3-8b").rope_scaling is None
    assert model_of("llama3.2-1b").rope_scaling.factor == 32


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_the_reader_of_folders_gives_the_same(name, tmp_path):
    values = KNOWN_MODELS[name].values
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert model_of(name) == config_from_pretrained(values) == model_of(tmp_path) == model_of(tmp_path / "config.json")


def test_a_plan_takes_them_all():
    """Every one can be cut into two stages with two ranks along tp."""
    plan = Plan(pp=2, dp=2, tp=2, zero=1, num_microbatches=4, precision="bfloat16")
    for name in KNOWN_MODELS:
        model = model_of(name)
        plan.check(model, sequence_length=4096)


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


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama3-8b", {"num_hidden_layers": None}, "config.json needs num_hidden_layers as a whole number, got None"),
        ("llama3-8b", {"mlp_bias": True}, "mlp_bias=True"),
        ("deepseek-v3", {"topk_method": "group_limited_greedy"}, "topk_method='group_limited_greedy'"),
    ],
)
def test_what_would_be_another_model_is_refused(name, change, message):
    with pytest.raises(ValueError, match=message):
        model_of(dict(KNOWN_MODELS[name].values) | change)


def test_every_architecture_has_a_known_model():
    assert {known.values["architectures"][0] for known in KNOWN_MODELS.values()} == set(FAMILIES)
