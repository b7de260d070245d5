"""The config.json of Qwen3-MoE: sizes of heads and experts, and what is refused.

Chapter: book/whole/weights.  In: the values of a config.json.  Out: a `V3MoEConfig`, and back.
Attention is Qwen3's; scores are a softmax over all experts, of which a token uses the k largest; there are no groups,
no biases and no shared experts.  `router_aux_loss_coef` is no part of the weights: `balance` is 0 here, and may be set
for training, where it weights our loss per sequence.
  layers     dense are those in `mlp_only_layers`, and all but every `decoder_sparse_step`-th one; here the first ones
Elsewhere: transformers `Qwen3MoeConfig`.
Source: Qwen Team 2025 (arXiv 2505.09388), section 2.
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

QWEN3_MOE = "Qwen3MoeForCausalLM"
_SIZES = {
    "vocab_size": "vocabulary_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_size",
    "moe_intermediate_size": "expert_ffn_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
}
_NEUTRAL: dict[str, tuple[Any, ...]] = NEUTRAL | {
    "use_sliding_window": (False, None),
    "tie_word_embeddings": (False, None),
}
_KINDS: dict[str, Kind] = {
    **dict.fromkeys((*_SIZES, "head_dim", "decoder_sparse_step"), WHOLE),
    **ROPE_KINDS,
    "rms_norm_eps": NUMBER,
    "mlp_only_layers": (list, "a list"),
    **dict.fromkeys(("tie_word_embeddings", "norm_topk_prob", "use_sliding_window"), TRUTH),
}
# what a Qwen3-MoE has, and a `V3MoEConfig` may have
_FIXED: dict[str, Any] = {
    "scoring": "softmax",
    "selection_bias": False,
    "qk_norm": True,
    "latent": None,
    "num_groups": 1,
    "num_groups_per_token": 1,
    "num_shared_experts": 0,
    "scale": 1.0,
}


def qwen3_moe_config(values: Mapping[str, Any], where: str) -> V3MoEConfig:
    """Return the sizes of a published Qwen3-MoE.

    Args:
        values: of its config.json.
        where: how messages name it.

    Raises:
        PretrainedError: a field that is missing, or one that this library cannot compute.
    """
    values = _renamed(values)
    check_kinds(values, where, _KINDS, _SIZES)
    check_neutral(values, where, _NEUTRAL)
    base, scaling = rope_of(values, where)
    head_size = values.get("head_dim")
    return V3MoEConfig(
        **{ours: values[theirs] for theirs, ours in _SIZES.items()},
        **_FIXED,
        num_dense_layers=_num_dense_layers(values, where),
        head_size=values["hidden_size"] // values["num_attention_heads"] if head_size is None else head_size,
        normalise=bool(values.get("norm_topk_prob", False)),
        balance=0.0,
        rope_base=base,
        rope_scaling=scaling,
        eps=1e-6 if values.get("rms_norm_eps") is None else float(values["rms_norm_eps"]),
    )


def qwen3_moe_values(config: V3MoEConfig, dtype: str) -> dict[str, Any]:
    """Return the values of config.json for a model; `dtype`: of its weights, such as "bfloat16"."""
    assert is_qwen3_moe(config), "see config_of"
    return {
        "architectures": [QWEN3_MOE],
        "model_type": "qwen3_moe",
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
        "head_dim": config.dense.size_of_head,
        "norm_topk_prob": config.normalise,
        "mlp_only_layers": list(range(config.num_dense_layers)),
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "rms_norm_eps": config.eps,
        **rope_values(config.rope_base, config.rope_scaling),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_sliding_window": False,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def is_qwen3_moe(config: V3MoEConfig) -> bool:
    """Return whether a model is a Qwen3-MoE.

    >>> is_qwen3_moe(V3MoEConfig())
    False
    """
    return all(getattr(config, name) == value for name, value in _FIXED.items())


def _renamed(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values with the number of experts under its usual name."""
    if values.get("num_experts") is None and "num_local_experts" in values:
        return {**values, "num_experts": values["num_local_experts"]}
    return values


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
