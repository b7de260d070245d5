"""The config.json of well-known models, and of layers that are dense in other places; nothing is loaded."""

import json
from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch
import transformers
from published import LLAMA3, QWEN3_MOE, SIZES, YARN, in_float64
from runs import ORACLES
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dualpipe_lab import models, tp
from dualpipe_lab.models.pretrained.config import config_to_pretrained
from dualpipe_lab.models.pretrained.load import check_form, full_shapes

# config.json of deepseek-ai/DeepSeek-V3, revision of December 2024; its README_WEIGHTS counts 671B parameters
DEEPSEEK_V3 = json.loads((ORACLES / "config_deepseek_v3.json").read_text())
# sizes of Qwen/Qwen3-30B-A3B, April 2025; its model card counts 30.5B parameters
QWEN3_30B_A3B = json.loads((ORACLES / "config_qwen3_30b_a3b.json").read_text())


def count(config):
    return sum(prod(shape) for shape in full_shapes(config).values())


def test_the_config_of_deepseek_v3_is_read():
    config = models.config_from_pretrained(DEEPSEEK_V3)
    assert round(count(config) / 1e9) == 671
    assert config.rope_scaling == tp.YarnScaling(40, 4096, 32, 1, 1.0, 1.0)
    assert config.rope_scaling.rotated_factor == 1
    assert config.rope_scaling.score_factor == pytest.approx(1.8738, abs=1e-4)  # (1 + 0.1 ln 40)^2
    theirs = transformers.DeepseekV3Config(**DEEPSEEK_V3)
    steps, length = in_float64(ROPE_INIT_FUNCTIONS["yarn"])(theirs)
    factors = torch.tensor(config.rope_scaling.factors(config.rope_base, 64), dtype=torch.float64)
    assert (steps / 10_000 ** -(torch.arange(0, 64, 2).double() / 64) - factors).abs().max() < 1e-14
    assert length == 1
    values = config_to_pretrained(config, "bfloat16")
    assert values["max_position_embeddings"] == 163840
    assert "quantization_config" not in values
    assert models.config_from_pretrained(values) == config


def test_the_config_of_qwen3_moe_is_read():
    config = models.config_from_pretrained(QWEN3_30B_A3B)
    assert round(count(config) / 1e9, 1) == 30.5
    assert config.num_dense_layers == config.balance == 0
    assert models.config_from_pretrained(config_to_pretrained(config, "bfloat16")) == config


SMALL = {"architectures": ["Qwen3MoeForCausalLM"], **SIZES, **QWEN3_MOE}
LAYERS = {  # of four: numbers of dense layers, or the layer that is refused
    "the first two": ({"mlp_only_layers": [0, 1]}, 2),
    "all": ({"mlp_only_layers": [3, 2, 1, 0]}, 4),
    "every fourth has experts": ({"decoder_sparse_step": 4}, 3),
    "every second has experts": ({"decoder_sparse_step": 2}, "layer 2 is dense behind one with experts"),
    "the last": ({"mlp_only_layers": [3]}, "layer 3 is dense behind one with experts"),
    "no step": ({"decoder_sparse_step": 0}, "decoder_sparse_step of at least 1, got 0"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_dense_layers_are_the_first_ones_as_in_transformers(name):
    changes, expected = LAYERS[name]
    if isinstance(expected, str):
        with pytest.raises(models.PretrainedError, match=expected):
            models.config_from_pretrained(SMALL | changes)
        return
    assert models.config_from_pretrained(SMALL | changes).num_dense_layers == expected
    theirs = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SMALL | changes))
    assert [hasattr(layer.mlp, "experts") for layer in theirs.model.layers] == [at >= expected for at in range(4)]


REFUSED = {
    "a bias": ({"attention_bias": True}, "attention_bias=True"),
    "a tied table": ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    "windows": ({"use_sliding_window": True}, "use_sliding_window=True"),
    "no experts": ({"num_experts": 0}, "a token uses 1..0 of 0 experts"),
    "a size missing": ({"moe_intermediate_size": None}, "needs moe_intermediate_size as a whole number, got None"),
    "one weight that is always 1": ({"num_experts_per_tok": 1}, "the normalised weight of a single expert is 1"),
    "layers by name": ({"mlp_only_layers": "0"}, "needs mlp_only_layers as a list"),
}


def test_a_qwen3_moe_that_is_not_computed_here_is_refused(subtests):
    for name in REFUSED:
        with subtests.test(name=name):
            changes, words = REFUSED[name]
            with pytest.raises(models.PretrainedError, match=words):
                models.config_from_pretrained(SMALL | changes)


def test_scaled_angles_are_read_and_written_again(subtests):
    for rope, family in product(
        [LLAMA3, YARN, YARN | {"attention_factor": 1.5, "truncate": False, "mscale_all_dim": None}],
        ["Llama", "Qwen3", "Qwen3Moe"],
    ):
        with subtests.test(rope=rope, family=family):
            values = SIZES | QWEN3_MOE | {"architectures": [f"{family}ForCausalLM"]}
            config = models.config_from_pretrained(values | {"rope_parameters": rope})
            assert (type(config.rope_scaling) is tp.YarnScaling) == (rope["rope_type"] == "yarn")
            assert models.config_from_pretrained(config_to_pretrained(config, "float32")) == config


@pytest.mark.parametrize(
    "changes",
    [
        {"scoring": "sigmoid"},
        {"num_shared_experts": 1},
        {"selection_bias": True},
        {"num_groups": 2, "num_groups_per_token": 2},
        {"scale": 2.0},
        {"qk_norm": False},
    ],
)
def test_what_is_no_qwen3_moe_has_no_published_form(changes):
    config = models.config_from_pretrained(SMALL)
    assert check_form(config) == config
    with pytest.raises(models.PretrainedError, match="a DeepSeek-V3 or a Qwen3-MoE"):
        check_form(replace(config, **changes))
