"""`config_from_pretrained`: the sizes of a published model, from its config.json.

Chapter: book/whole/weights.  In: a folder, or the values of its config.json.  Out: a `LlamaConfig` or a `V3MoEConfig`.
A field that changes what the model computes is read or refused; one that this library does not know and that is set to
something else than its neutral value would train another model without a sign.
Elsewhere: transformers `AutoConfig.from_pretrained`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.pretrained.deepseek_v3 import V3, v3_config, v3_values
from dualpipe_lab.models.pretrained.fields import (
    NEUTRAL,
    NUMBER,
    TRUTH,
    WHOLE,
    Kind,
    PretrainedError,
    check_kinds,
    check_neutral,
    read_json,
)
from dualpipe_lab.models.pretrained.fp8_blocks import blocks_of
from dualpipe_lab.models.pretrained.qwen3_moe import QWEN3_MOE, is_qwen3_moe, qwen3_moe_config, qwen3_moe_values
from dualpipe_lab.models.pretrained.rope import ROPE_KINDS, rope_of, rope_values
from dualpipe_lab.models.stage_rules import ModelConfig

FAMILIES = ("LlamaForCausalLM", "Qwen3ForCausalLM", QWEN3_MOE, V3)
_SIZES = {
    "vocab_size": "vocabulary_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
_NEUTRAL: dict[str, tuple[Any, ...]] = NEUTRAL | {
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
}
_KINDS: dict[str, Kind] = {
    **dict.fromkeys((*_SIZES, "num_key_value_heads", "head_dim"), WHOLE),
    **ROPE_KINDS,
    "rms_norm_eps": NUMBER,
    "tie_word_embeddings": TRUTH,
    "layer_types": (list, "a list"),
}


def config_from_pretrained(source: Path | str | Mapping[str, Any]) -> ModelConfig:
    """Return the sizes of a published model.

    Args:
        source: a folder with config.json, or its values.

    Raises:
        PretrainedError: another family, a field that is missing, or one that this library cannot compute.

    >>> config_from_pretrained({"architectures": ["MambaForCausalLM"]})
    Traceback (most recent call last):
    dualpipe_lab.models.pretrained.fields.PretrainedError: config.json is of MambaForCausalLM; known are \
LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM, DeepseekV3ForCausalLM
    """
    if isinstance(source, Mapping):
        values, where = source, "config.json"
    else:
        file = Path(source) / "config.json"
        values, where = read_json(file), str(file)
    family = _family(values, where)
    try:
        blocks_of(values, where)  # refuses weights that are quantised in a way that is not known
    except ValueError as error:
        raise PretrainedError(str(error)) from error
    config = _config_of(family, values, where)
    try:
        config.check()
    except ValueError as error:
        raise PretrainedError(f"{where}: {error}") from error
    return config


def _config_of(family: str, values: Mapping[str, Any], where: str) -> ModelConfig:
    if family == V3:
        return v3_config(values, where)
    if family == QWEN3_MOE:
        return qwen3_moe_config(values, where)
    return _dense_config(family, values, where)


def _dense_config(family: str, values: Mapping[str, Any], where: str) -> LlamaConfig:
    check_kinds(values, where, _KINDS, _SIZES)
    check_neutral(values, where, _NEUTRAL)
    kinds = values.get("layer_types") or []
    if other := sorted(set(kinds) - {"full_attention"}):
        raise PretrainedError(f"{where} has layers of {other[0]}; every layer here attends to all positions before")
    base, scaling = rope_of(values, where)
    sizes = {ours: values[theirs] for theirs, ours in _SIZES.items()}
    return LlamaConfig(
        **sizes,
        num_kv_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
        head_size=values.get("head_dim") or (128 if family == "Qwen3ForCausalLM" else None),
        rope_base=base,
        eps=1e-6 if values.get("rms_norm_eps") is None else float(values["rms_norm_eps"]),
        qk_norm=family == "Qwen3ForCausalLM",
        tied=bool(values.get("tie_word_embeddings", False)),
        rope_scaling=scaling,
    )


def config_to_pretrained(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the values of config.json for a model; `dtype`: of its weights, such as "bfloat16"."""
    if not isinstance(config, LlamaConfig):
        return qwen3_moe_values(config, dtype) if is_qwen3_moe(config) else v3_values(config, dtype)
    family = "Qwen3" if config.qk_norm else "Llama"
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.size_of_head,
        "hidden_act": "silu",
        "rms_norm_eps": config.eps,
        **rope_values(config.rope_base, config.rope_scaling),
        "tie_word_embeddings": config.tied,
        "attention_bias": False,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _family(values: Mapping[str, Any], where: str) -> str:
    named = values.get("architectures")
    if not isinstance(named, list) or len(named) != 1:
        raise PretrainedError(
            f"{where} names no architecture, got architectures={named!r}; known are {', '.join(FAMILIES)}"
        )
    if named[0] not in FAMILIES:
        raise PretrainedError(f"{where} is of {named[0]}; known are {', '.join(FAMILIES)}")
    return str(named[0])
