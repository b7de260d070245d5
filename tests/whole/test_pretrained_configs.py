"""The config.json of well-known models, and of layers that are dense in other places; nothing is loaded."""

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
import transformers
from published import LLAMA3, QWEN3_MOE, SIZES, YARN, in_float64
from runs import ORACLES
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dualpipe_lab import models, tp
from dualpipe_lab.models.parameters import full_parameters
from dualpipe_lab.models.pretrained.config import config_to_pretrained
from dualpipe_lab.models.pretrained.load import check_form, tensors_of

# config.json of deepseek-ai/DeepSeek-V3, revision of December 2024; its README_WEIGHTS counts 671B parameters
DEEPSEEK_V3 = json.loads((ORACLES / "config_deepseek_v3.json").read_text())
# sizes of Qwen/Qwen3-30B-A3B, April 2025; its model card counts 30.5B parameters
QWEN3_30B_A3B = json.loads((ORACLES / "config_qwen3_30b_a3b.json").read_text())


def count(config):
    return sum(parameter.numel for parameter in full_parameters(config).values())


V3_1 = {"quantization_config": DEEPSEEK_V3["quantization_config"] | {"scale_fmt": "ue8m0"}}
# moonshotai/Kimi-K2-Instruct, July 2025; K2-Thinking has other weights
KIMI_K2 = {
    "first_k_dense_replace": 1, "model_type": "kimi_k2", "n_group": 1, "n_routed_experts": 384, "topk_group": 1,
    "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827, "vocab_size": 163840, "max_position_embeddings": 131072,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
}  # fmt: skip
# moonshotai/Moonlight-16B-A3B, February 2025
MOONLIGHT = {
    "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408,
    "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "num_attention_heads": 16, "num_experts_per_tok": 6,
    "num_hidden_layers": 27, "num_key_value_heads": 16, "num_nextn_predict_layers": 0, "q_lora_rank": None,
    "rope_scaling": None, "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "topk_group": 1, "vocab_size": 163840,
    "rms_norm_eps": 1e-05, "quantization_config": None,
}  # fmt: skip
PACKED = {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}
OF_THE_FAMILY = {"V3": ({}, 671), "V3.1": (V3_1, 671), "Kimi-K2": (KIMI_K2, 1026),
                 "Kimi-K2-Thinking": (KIMI_K2 | PACKED, 1026), "Moonlight": (MOONLIGHT, 16)}  # fmt: skip


@pytest.mark.parametrize("name", OF_THE_FAMILY)
def test_the_configs_of_the_family_of_deepseek_v3_are_read(name):
    changes, billions = OF_THE_FAMILY[name]
    config = models.config_from_pretrained(DEEPSEEK_V3 | changes)
    assert round(count(config) / 1e9) == billions
    values = config_to_pretrained(config, "bfloat16")
    assert "quantization_config" not in values
    assert models.config_from_pretrained(values) == config
    if config.rope_scaling is not None:
        steps, length = in_float64(ROPE_INIT_FUNCTIONS["yarn"])(transformers.DeepseekV3Config(**DEEPSEEK_V3 | changes))
        factors = torch.tensor(config.rope_scaling.factors(config.rope_base, 64), dtype=torch.float64)
        assert (steps / config.rope_base ** -(torch.arange(0, 64, 2).double() / 64) - factors).abs().max() < 1e-14
        assert length == config.rope_scaling.rotated_factor == 1
    if name == "V3":
        assert values["max_position_embeddings"] == 163840
        assert config.rope_scaling == tp.YarnScaling(40, 4096, 32, 1, 1.0, 1.0)
        assert config.rope_scaling.score_factor == pytest.approx(1.8738, abs=1e-4)  # (1 + 0.1 ln 40)^2


ANGLES = {  # of a Llama: values of config.json, and what is refused
    "a part of each head": ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
    "by kinds of layers": ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "with full_attention="),
    "three axes": ({"rope_scaling": {"type": "default", "mrope_section": [2, 2, 2]}}, r"mrope_section=\[2, 2, 2\]"),
    "llama3 with more": ({"rope_scaling": LLAMA3 | {"mixture": 2}}, "by 'llama3' with mixture=2"),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "by 'linear'"),
    "dynamic": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "by 'dynamic'"),
    "one behind the other": (
        {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": YARN},
        "and another rope_scaling",
    ),
}


def test_angles_that_are_not_computed_here_are_refused(subtests):
    for name, (changes, words) in ANGLES.items():
        with subtests.test(name=name), pytest.raises(models.PretrainedError, match=words):
            models.config_from_pretrained(SIZES | {"architectures": ["LlamaForCausalLM"]} | changes)
    same = {
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 1.0, "factor": None}
    }
    plain = models.config_from_pretrained(SIZES | {"architectures": ["LlamaForCausalLM"]})
    assert models.config_from_pretrained(SIZES | {"architectures": ["LlamaForCausalLM"]} | same) == plain


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


def test_qwen3_moe_and_scaled_angles_are_read_and_written_again(subtests):
    config = models.config_from_pretrained(QWEN3_30B_A3B)
    assert round(count(config) / 1e9, 1) == 30.5
    assert models.config_from_pretrained(config_to_pretrained(config, "bfloat16")) == config
    for rope, family in product(
        [LLAMA3, YARN, YARN | {"truncate": True, "mscale_all_dim": None}],
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


LATENT = tp.LatentSizes(12, 10, 6, 4, 5)
LISTED = [
    models.LlamaConfig(qk_norm=True, tied=True),
    models.LlamaConfig(head_size=12),
    models.V3MoEConfig(num_shared_experts=2),
    models.V3MoEConfig(num_dense_layers=0, num_shared_experts=0, selection_bias=False, qk_norm=True),
    models.V3MoEConfig(latent=LATENT),
    models.V3MoEConfig(latent=replace(LATENT, query_rank=None), num_dense_layers=3),
]


@pytest.mark.parametrize("config", LISTED, ids=str)
def test_the_list_of_parameters_is_that_of_the_modules(config):
    """Names, shapes and order; the cuts along tp and ep are compared by `test_weights_start` with what ranks read."""
    make = models.PlainLlama if isinstance(config, models.LlamaConfig) else models.PlainV3MoE
    with torch.device("meta"):
        found = {name: tuple(tensor.shape) for name, tensor in tensors_of(make(config, device="meta"))}
    assert list(found.items()) == [(name, each.shape) for name, each in full_parameters(config).items()]
