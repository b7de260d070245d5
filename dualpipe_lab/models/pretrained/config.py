"""`config_from_pretrained`: the sizes of a published model, from its config.json; needs no torch.

Chapter: book/whole/weights.  In: a folder, or the values of its config.json.  Out: a `LlamaConfig` or a `V3MoEConfig`.
  sizes     a field that is there has the kind that it must have, and a size is there
  neutral   a field that would change what the model computes, and is not known here, has a value that changes nothing
  angles    newer files have `rope_parameters` with base and scaling, older ones `rope_theta` and `rope_scaling`
  layers    dense ones of a Qwen3-MoE are those in `mlp_only_layers`, and all but every `decoder_sparse_step`-th one;
            here they are the first ones.  Those of a DeepSeek-V3 that predict a second token are left out
  balance   its coefficient is no part of a published model: it is 0 here, and may be set for training
The norms of a DeepSeek-V3's latents have an eps of 1e-6 whatever `rms_norm_eps` is, as in transformers.
Elsewhere: transformers `AutoConfig.from_pretrained`, `ROPE_INIT_FUNCTIONS`.
Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 4.2; Qwen Team 2025 (arXiv 2505.09388), section 2.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.stage_rules import ModelConfig
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.tp.latent_sizes import LatentSizes
from dualpipe_lab.tp.rope_scaling import RopeScaling, Scaling, YarnScaling


class PretrainedError(ValueError):
    """A folder of published weights that cannot be used: which file or tensor, and why."""


Kind: TypeAlias = tuple[type | tuple[type, ...], str]


class Family(NamedTuple):
    """The published models of one architecture."""

    model_type: str
    sizes: Mapping[str, str]  # names of sizes in a file, and here
    neutral: Mapping[str, tuple[Any, ...]]  # values under which a field changes nothing; the first is written, if any
    fixed: Mapping[str, Any]  # what all of them have, and a config may have otherwise


LLAMA, QWEN3, QWEN3_MOE = "LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
V3 = "DeepseekV3ForCausalLM"
_SIZES = {
    "vocab_size": "vocabulary_size", "hidden_size": "hidden_size", "intermediate_size": "ffn_size",
    "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
}  # fmt: skip
_MOE_SIZES = _SIZES | {"moe_intermediate_size": "expert_ffn_size", "num_experts_per_tok": "num_experts_per_token"}
_QWEN_SIZES = _MOE_SIZES | {"num_experts": "num_experts", "num_key_value_heads": "num_kv_heads"}
_V3_SIZES = _MOE_SIZES | {
    "first_k_dense_replace": "num_dense_layers", "n_routed_experts": "num_experts", "n_group": "num_groups",
    "topk_group": "num_groups_per_token", "n_shared_experts": "num_shared_experts",
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": "kv_rank", "qk_nope_head_dim": "content", "qk_rope_head_dim": "position", "v_head_dim": "value",
}  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish", None), "attention_bias": (False, None), "attention_dropout": (None, 0),
}  # fmt: skip
_DENSE_NEUTRAL = _NEUTRAL | dict.fromkeys(("mlp_bias", "use_sliding_window"), (None, False))
_DENSE_NEUTRAL["partial_rotary_factor"] = (None, 1)
_QWEN_NEUTRAL = _NEUTRAL | dict.fromkeys(("use_sliding_window", "tie_word_embeddings"), (False, None))
_V3_NEUTRAL = _NEUTRAL | {
    "rope_interleave": (True, None), "norm_topk_prob": (True, None), "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None), "moe_layer_freq": (None, 1), "tie_word_embeddings": (False, None),
}  # fmt: skip
_QWEN_FIXED: dict[str, Any] = {
    "scoring": "softmax", "selection_bias": False, "qk_norm": True, "latent": None, "num_groups": 1,
    "num_groups_per_token": 1, "num_shared_experts": 0, "scale": 1.0,
}  # fmt: skip
_V3_FIXED = {"scoring": "sigmoid", "normalise": True, "selection_bias": True, "qk_norm": False}
FAMILIES = {
    LLAMA: Family("llama", _SIZES, _DENSE_NEUTRAL, {"qk_norm": False}),
    QWEN3: Family("qwen3", _SIZES, _DENSE_NEUTRAL, {"qk_norm": True}),
    QWEN3_MOE: Family("qwen3_moe", _QWEN_SIZES, _QWEN_NEUTRAL, _QWEN_FIXED),
    V3: Family("deepseek_v3", _V3_SIZES, _V3_NEUTRAL, _V3_FIXED),
}
_MORE_SIZES = (
    "num_key_value_heads", "head_dim", "decoder_sparse_step", "q_lora_rank", "num_nextn_predict_layers",
)  # fmt: skip
_KINDS: dict[str, Kind] = {
    **dict.fromkeys((*_QWEN_SIZES, *_V3_SIZES, *_LATENT, *_MORE_SIZES), (int, "a whole number")),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), (Mapping, "an object of names and values")),
    **dict.fromkeys(("rope_theta", "rms_norm_eps", "routed_scaling_factor"), ((int, float), "a number")),
    **dict.fromkeys(("layer_types", "mlp_only_layers"), (list, "a list")),
    **dict.fromkeys(
        ("tie_word_embeddings", "norm_topk_prob", "use_sliding_window", "rope_interleave"), (bool, "true or false")
    ),
}


def config_from_pretrained(source: Path | str | Mapping[str, Any]) -> ModelConfig:
    """Return the sizes of a published model.

    Args:
        source: a folder with config.json, such a file, or its values; quantised weights are refused where they are
            opened.

    Raises:
        PretrainedError: another family, a field that is missing, or one that this library cannot compute.

    >>> config_from_pretrained({"architectures": ["MambaForCausalLM"]})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dualpipe_lab.models.pretrained.config.PretrainedError: config.json needs one architecture of LlamaForCausalLM, ...
    """
    file = Path("" if isinstance(source, Mapping) else source)
    file = file if file.is_file() else file / "config.json"
    values, where = source if isinstance(source, Mapping) else read_json(file), str(file)
    named = values.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in FAMILIES:
        raise PretrainedError(f"{where} needs one architecture of {', '.join(FAMILIES)}, got architectures={named!r}")
    config = _READERS[named[0]](values, where, FAMILIES[named[0]])
    try:
        config.check()
    except ValueError as error:
        raise PretrainedError(f"{where}: {error}") from error
    return config


def config_to_pretrained(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the values of config.json for a model; `dtype`: of its weights, such as "bfloat16"."""
    name = family_of(config)
    assert name is not None, "see check_form"
    family = FAMILIES[name]
    if isinstance(config, LlamaConfig):
        more: dict[str, Any] = {"num_key_value_heads": config.num_kv_heads, "head_dim": config.size_of_head}
        more["tie_word_embeddings"] = config.tied
    elif config.latent is None:
        more = {"head_dim": config.dense.size_of_head, "norm_topk_prob": config.normalise, "decoder_sparse_step": 1}
        more |= {"mlp_only_layers": list(range(config.num_dense_layers))}
    else:
        more = {"num_key_value_heads": config.num_heads, "q_lora_rank": config.latent.query_rank}
        more |= {theirs: getattr(config.latent, ours) for theirs, ours in _LATENT.items()}
        more |= {"num_nextn_predict_layers": 0, "routed_scaling_factor": config.scale}
    return {
        "architectures": [name],
        "model_type": family.model_type,
        **{theirs: getattr(config, ours) for theirs, ours in family.sizes.items()},
        **{field: values[0] for field, values in family.neutral.items() if values[0] is not None},
        **more,
        "rms_norm_eps": config.eps,
        **_rope_values(config.rope_base, config.rope_scaling),
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def family_of(config: ModelConfig) -> str | None:
    """Return the architecture of a model; None if it has no published form."""
    names = (LLAMA, QWEN3) if isinstance(config, LlamaConfig) else (QWEN3_MOE, V3)
    found = [name for name in names if all(getattr(config, field) == it for field, it in FAMILIES[name].fixed.items())]
    if found == [V3] and (getattr(config, "latent", None) is None or isinstance(config.rope_scaling, RopeScaling)):
        return None
    return found[0] if found else None


def _llama(values: Mapping[str, Any], where: str, family: Family) -> LlamaConfig:
    common = _common(values, where, family)
    if other := sorted(set(values.get("layer_types") or []) - {"full_attention"}):
        raise PretrainedError(f"{where} has layers of {other[0]}; every layer here attends to all positions before")
    return LlamaConfig(
        **common,
        num_kv_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
        head_size=values.get("head_dim") or (128 if common["qk_norm"] else None),  # of every Qwen3
        tied=bool(values.get("tie_word_embeddings", False)),
    )


def _v3(values: Mapping[str, Any], where: str, family: Family) -> V3MoEConfig:
    common = _common(values, where, family, (*_LATENT, "routed_scaling_factor"))
    heads = values["num_attention_heads"]
    if values.get("num_key_value_heads") not in (None, heads):
        raise PretrainedError(
            f"{where}: with latents every head has its own keys, got num_key_value_heads="
            f"{values['num_key_value_heads']} for {heads} heads"
        )
    if isinstance(common["rope_scaling"], RopeScaling):
        raise PretrainedError(
            f"{where} scales its rotary angles by 'llama3', which no published model with latents does; known for "
            "them are 'default' and 'yarn'"
        )
    latent = LatentSizes(values.get("q_lora_rank"), **{ours: values[theirs] for theirs, ours in _LATENT.items()})
    scale = float(values["routed_scaling_factor"])
    return V3MoEConfig(**common, num_kv_heads=heads, scale=scale, balance=0.0, latent=latent)


def _qwen3_moe(values: Mapping[str, Any], where: str, family: Family) -> V3MoEConfig:
    if values.get("num_experts") is None and "num_local_experts" in values:
        values = {**values, "num_experts": values["num_local_experts"]}
    common, head_size = _common(values, where, family), values.get("head_dim")
    return V3MoEConfig(
        **common,
        num_dense_layers=_num_dense_layers(values, where),
        head_size=values["hidden_size"] // values["num_attention_heads"] if head_size is None else head_size,
        normalise=bool(values.get("norm_topk_prob", False)),
        balance=0.0,
    )


_READERS: dict[str, Callable[[Mapping[str, Any], str, Family], ModelConfig]] = {
    LLAMA: _llama, QWEN3: _llama, QWEN3_MOE: _qwen3_moe, V3: _v3,
}  # fmt: skip


def _num_dense_layers(values: Mapping[str, Any], where: str) -> int:
    """Return the number of first layers that are dense; refuse a dense layer behind one with experts."""
    num_layers, dense = values["num_hidden_layers"], values.get("mlp_only_layers") or []
    step = 1 if values.get("decoder_sparse_step") is None else values["decoder_sparse_step"]
    if step < 1:
        raise PretrainedError(f"{where} needs decoder_sparse_step of at least 1, got {step}")
    found = [number in dense or (number + 1) % step > 0 for number in range(num_layers)]
    count = sum(found)
    if not all(found[:count]):
        late = found.index(True, found.index(False))
        raise PretrainedError(
            f"{where}: layer {late} is dense behind one with experts (mlp_only_layers={dense}, decoder_sparse_step="
            f"{step}); here the dense layers are the first ones"
        )
    return count


def _common(values: Mapping[str, Any], where: str, family: Family, needed: Iterable[str] = ()) -> dict[str, Any]:
    """Return what all families have, after checking every field that is known here."""
    for name, (kind, words) in _KINDS.items():
        value = values.get(name)
        is_missing = value is None and (name in family.sizes or name in needed)
        if is_missing or (value is not None and not _is_kind(value, kind)):
            raise PretrainedError(f"{where} needs {name} as {words}, got {value!r}")
    for name, allowed in family.neutral.items():
        if values.get(name) not in allowed:
            raise PretrainedError(
                f"{where} has {name}={values[name]!r}, which this model does not compute; it would be another model"
            )
    found = {ours: values[theirs] for theirs, ours in family.sizes.items()} | dict(family.fixed)
    found["rope_base"], found["rope_scaling"] = _rope_of(values, where)
    return found | {"eps": 1e-6 if values.get("rms_norm_eps") is None else float(values["rms_norm_eps"])}


def _is_kind(value: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))  # true and false are no numbers


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; PretrainedError if there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PretrainedError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise PretrainedError(f"{file} holds no object of names and values")
    return found


# ---- rotary angles
_LENGTH = "original_max_position_embeddings"
_YARN = {"factor": "factor", _LENGTH: "original_length"}
_LLAMA3 = {"factor": "factor", "low_freq_factor": "low_factor", "high_freq_factor": "high_factor"} | _YARN
_YARN_OPTIONS = {name: name for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")}
_ANY_FIELDS = {"rope_type", "type", "rope_theta"}
_ROPE_FIELDS = {"yarn": {*_ANY_FIELDS, *_YARN, *_YARN_OPTIONS}, "llama3": {*_ANY_FIELDS, *_LLAMA3}}
_ROPE_FIELDS["default"] = _ROPE_FIELDS["yarn"] | _ROPE_FIELDS["llama3"]
_ROPE_NEUTRAL = ("partial_rotary_factor", 1), ("truncate", True)


def _rope_of(values: Mapping[str, Any], where: str) -> tuple[float, Scaling | None]:
    """Return base and scaling of the rotary angles."""
    newer, older = values.get("rope_parameters") or {}, values.get("rope_scaling") or {}
    if newer and {**newer, **older} != newer:
        raise PretrainedError(f"{where} has rope_parameters={newer} and another rope_scaling={older}; keep one of them")
    found = newer or older
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind not in _ROPE_FIELDS:
        raise PretrainedError(f"{where} scales its rotary angles by {kind!r}; known are 'default', 'llama3' and 'yarn'")
    neutral = {name for name, value in found.items() if value is None or (name, value) in _ROPE_NEUTRAL}
    if unknown := sorted(set(found) - _ROPE_FIELDS[kind] - neutral):
        raise PretrainedError(
            f"{where} scales its rotary angles by {kind!r} with {unknown[0]}={found[unknown[0]]!r}, which is not known"
        )
    base = _number(found.get("rope_theta") or values.get("rope_theta") or 10_000.0, "rope_theta", kind, where)
    if kind == "default":
        return float(base), None
    if values.get(_LENGTH) is not None:
        found = {**found, _LENGTH: values[_LENGTH]}  # one outside of the object counts more
    names = _LLAMA3
    if kind == "yarn":  # an option that is left out, or is 0, has yarn's own value
        names = _YARN | {name: name for name in _YARN_OPTIONS if found.get(name) not in (None, 0)}
    numbers = {ours: _number(found.get(theirs), theirs, kind, where) for theirs, ours in names.items()}
    try:
        return float(base), (RopeScaling if kind == "llama3" else YarnScaling)(**numbers)
    except ValueError as error:
        raise PretrainedError(f"{where}: {error}") from error


def _rope_values(base: float, scaling: Scaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_theta": base, "rope_parameters": {"rope_type": "default", "rope_theta": base}}
    is_yarn = isinstance(scaling, YarnScaling)
    names = _YARN | _YARN_OPTIONS if is_yarn else _LLAMA3
    numbers = {theirs: value for theirs, ours in names.items() if (value := getattr(scaling, ours))}
    found = {"rope_type": "yarn" if is_yarn else "llama3", "rope_theta": base, **numbers}
    # transformers compares the two, and warns
    longest = {"max_position_embeddings": round(scaling.factor * scaling.original_length)} if is_yarn else {}
    return {"rope_theta": base, "rope_parameters": found} | longest


def _number(value: Any, name: str, kind: str, where: str) -> float:
    if not _is_kind(value, (int, float)):
        raise PretrainedError(f"{where}: rotary angles of kind {kind!r} need {name} as a number, got {value!r}")
    number: float = value
    return number
