"""The config.json of DeepSeek-V3: sizes of latents, experts and groups, and what is refused.

Chapter: book/whole/weights.  In: the values of a config.json.  Out: a `V3MoEConfig`, and back.
The balance loss is no part of a published model: its coefficient is 0 here, and may be set for training.  The layer of
the files that predicts a second token is left out, as in transformers.
The norms of the latents have an eps of 1e-6 whatever `rms_norm_eps` is, as in transformers.
Elsewhere: transformers `DeepseekV3Config`.
Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 4.2.
"""

from collections.abc import Mapping
from typing import Any

from dualpipe_lab.models.pretrained.fields import (
    NEUTRAL,
    NUMBER,
    TRUTH,
    WHOLE,
    Kind,
    PretrainedError,
    check_kinds,
    check_neutral,
)
from dualpipe_lab.models.pretrained.rope import ROPE_KINDS, rope_of, rope_values
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.tp.latent_sizes import LatentSizes
from dualpipe_lab.tp.rope_scaling import RopeScaling

V3 = "DeepseekV3ForCausalLM"
_SIZES = {
    "vocab_size": "vocabulary_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_size",
    "moe_intermediate_size": "expert_ffn_size",
    "num_hidden_layers": "num_layers",
    "first_k_dense_replace": "num_dense_layers",
    "num_attention_heads": "num_heads",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_group": "num_groups",
    "topk_group": "num_groups_per_token",
    "n_shared_experts": "num_shared_experts",
}
_LATENT = {
    "kv_lora_rank": "kv_rank",
    "qk_nope_head_dim": "content",
    "qk_rope_head_dim": "position",
    "v_head_dim": "value",
}
_NEUTRAL: dict[str, tuple[Any, ...]] = NEUTRAL | {
    "rope_interleave": (True, None),
    "norm_topk_prob": (True, None),
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
    "moe_layer_freq": (1, None),
    "tie_word_embeddings": (False, None),
}
_KINDS: dict[str, Kind] = {
    **dict.fromkeys((*_SIZES, *_LATENT, "q_lora_rank", "num_key_value_heads", "num_nextn_predict_layers"), WHOLE),
    **dict.fromkeys(("rms_norm_eps", "routed_scaling_factor"), NUMBER),
    **ROPE_KINDS,
    **dict.fromkeys(("tie_word_embeddings", "rope_interleave", "norm_topk_prob"), TRUTH),
}


def v3_config(values: Mapping[str, Any], where: str) -> V3MoEConfig:
    """Return the sizes of a published DeepSeek-V3.

    Args:
        values: of its config.json.
        where: how messages name it.

    Raises:
        PretrainedError: a field that is missing, or one that this library cannot compute.
    """
    check_kinds(values, where, _KINDS, (*_SIZES, *_LATENT, "routed_scaling_factor"))
    check_neutral(values, where, _NEUTRAL)
    heads = values["num_attention_heads"]
    if values.get("num_key_value_heads") not in (None, heads):
        raise PretrainedError(
            f"{where}: with latents every head has its own keys, got num_key_value_heads="
            f"{values['num_key_value_heads']} for {heads} heads"
        )
    base, scaling = rope_of(values, where)
    if isinstance(scaling, RopeScaling):
        raise PretrainedError(
            f"{where} scales its rotary angles by 'llama3', which no published model with latents does; known for "
            "them are 'default' and 'yarn'"
        )
    latent = {ours: values[theirs] for theirs, ours in _LATENT.items()}
    return V3MoEConfig(
        **{ours: values[theirs] for theirs, ours in _SIZES.items()},
        num_kv_heads=heads,
        scale=float(values["routed_scaling_factor"]),
        balance=0.0,
        rope_base=base,
        rope_scaling=scaling,
        eps=1e-6 if values.get("rms_norm_eps") is None else float(values["rms_norm_eps"]),
        latent=LatentSizes(values.get("q_lora_rank"), **latent),
    )


def is_v3(config: V3MoEConfig) -> bool:
    """Return whether a model is a DeepSeek-V3."""
    others = config.qk_norm or isinstance(config.rope_scaling, RopeScaling)
    routes = (config.scoring, config.normalise, config.selection_bias) == ("sigmoid", True, True)
    return config.latent is not None and routes and not others


def v3_values(config: V3MoEConfig, dtype: str) -> dict[str, Any]:
    """Return the values of config.json for a model; `dtype`: of its weights, such as "bfloat16"."""
    assert config.latent is not None, "see config_of"
    return {
        "architectures": [V3],
        "model_type": "deepseek_v3",
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": config.latent.query_rank,
        **{theirs: getattr(config.latent, ours) for theirs, ours in _LATENT.items()},
        "num_nextn_predict_layers": 0,
        "routed_scaling_factor": config.scale,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rms_norm_eps": config.eps,
        **rope_values(config.rope_base, config.rope_scaling),
        "rope_interleave": True,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
