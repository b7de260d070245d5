"""`model_of`: the sizes of a published model that the runtime trains, by its name or from its config.json.

In: a name, a folder, a file, or the values of a config.json.  Out: a `LlamaConfig` or a `V3MoEConfig`.
  names                        of `known_models()`; nothing is downloaded
  Llama, Qwen3, DeepSeek-V3    as `models.config_from_pretrained` reads them; a second token is a plan's matter
Elsewhere: transformers `AutoConfig.from_pretrained`.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from dualpipe_lab.models.pretrained.config import config_from_pretrained
from dualpipe_lab.models.stage_rules import ModelConfig


class KnownModel(NamedTuple):
    """A published model."""

    values: Mapping[str, Any]  # of its config.json, by their names there
    published: str  # the number of its parameters, as it is printed, without a second token's layers
    source: str  # where the values were read


_TITAN = "pytorch/torchtitan, torchtitan/models, commit b5bcd76c"
_THUNDER = "kevinstephano/thunder_model_blocks, commit 5c083b0e"
_V3_SOURCE = f"transformers 5.23 DeepseekV3Config; {_TITAN}/deepseek_v3: 671B for the angles"
_LLAMA3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
_ANGLES: dict[str, Any] = {
    "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
}  # fmt: skip
_LLAMA31 = _LLAMA3 | {"rope_scaling": _ANGLES | {"factor": 8.0}}
_LLAMA32 = _LLAMA3 | {"rope_scaling": _ANGLES | {"factor": 32.0}, "tie_word_embeddings": True}
_QWEN3: dict[str, Any] = {
    "vocab_size": 151936, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": False
}  # fmt: skip
_QWEN3_DENSE = _QWEN3 | {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 8}
_QWEN3_MOE = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280, "num_key_value_heads": 128,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "n_group": 8, "topk_group": 4, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "rope_scaling": {
        "type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip


def _known(
    common: Mapping[str, Any], sizes: tuple[int, int, int, int], published: str, source: str, **more: Any
) -> KnownModel:
    names = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
    return KnownModel({**common, **dict(zip(names, sizes, strict=True)), **more}, published, source)


_8B, _70B, _405B = (4096, 14336, 32, 32), (8192, 28672, 80, 64), (16384, 53248, 126, 128)
_MODELS = {
    "llama3-8b": _known(_LLAMA3, _8B, "8.03e9", _THUNDER),
    "llama3-70b": _known(_LLAMA3, _70B, "70.6e9", f"{_TITAN}/llama3: 70B"),
    "llama3-405b": _known(_LLAMA3, _405B, "405.9e9", "Grattafiori et al. 2024 (arXiv 2407.21783), table 3"),
    "llama3.1-8b": _known(_LLAMA31, _8B, "8.03e9", f"{_TITAN}/llama3: 8B"),
    "llama3.1-70b": _known(_LLAMA31, _70B, "70.6e9", f"{_TITAN}/llama3: 70B"),
    "llama3.1-405b": _known(_LLAMA31, _405B, "405.9e9", f"{_TITAN}/llama3: 405B"),
    "llama3.2-1b": _known(_LLAMA32, (2048, 8192, 16, 32), "1.24e9", _THUNDER, head_dim=64),
    "llama3.2-3b": _known(_LLAMA32, (3072, 8192, 28, 24), "3.21e9", f"{_TITAN}/llama3: 3B", head_dim=128),
    "qwen3-8b": _known(_QWEN3_DENSE, (4096, 12288, 36, 32), "8.2e9", f"{_TITAN}/qwen3: 8B"),
    "qwen3-14b": _known(_QWEN3_DENSE, (5120, 17408, 40, 40), "14.8e9", f"{_TITAN}/qwen3: 14B"),
    "qwen3-32b": _known(_QWEN3_DENSE, (5120, 25600, 64, 64), "32.8e9", f"{_TITAN}/qwen3: 32B"),
    "qwen3-30b-a3b": _known(
        _QWEN3_MOE, (2048, 6144, 48, 32), "30.5e9", f"{_TITAN}/qwen3: 30B-A3B", moe_intermediate_size=768
    ),
    "qwen3-235b-a22b": _known(
        _QWEN3_MOE, (4096, 12288, 94, 64), "235.1e9", f"{_TITAN}/qwen3: 235B-A22B", moe_intermediate_size=1536
    ),
    "deepseek-v3": _known(_V3, (7168, 18432, 61, 128), "671.0e9", _V3_SOURCE),
}


def known_models() -> dict[str, KnownModel]:
    """Return the models that `model_of` knows by name, with their sources."""
    return dict(_MODELS)


def model_of(source: str | Path | Mapping[str, Any]) -> ModelConfig:
    """Return the sizes of a published model.

    Args:
        source: a name of `known_models()`, a folder with config.json, such a file, or its values.

    Raises:
        ValueError: a name that is neither, with the nearest one; another architecture; a field that is missing, or one
            that this library cannot compute.

    >>> model_of("llama3-8b").num_parameters()
    8030261248
    >>> model_of("lama3-8b")
    Traceback (most recent call last):
    ValueError: no model and no folder is called 'lama3-8b'; the nearest known model is llama3-8b
    """
    name = "" if isinstance(source, Mapping) else str(source)
    if name in _MODELS:
        return config_from_pretrained(_MODELS[name].values)
    if isinstance(source, Mapping) or Path(source).exists():
        return config_from_pretrained(source)
    wanted = name.rsplit("/", 1)[-1].lower().replace("_", "-").replace("meta-", "").replace("llama-3", "llama3")
    longer = [known for known in _MODELS if known.startswith(wanted.removesuffix("-instruct"))]
    nearest = get_close_matches(wanted, longer or list(_MODELS), n=1, cutoff=0)[0]
    raise ValueError(f"no model and no folder is called {name!r}; the nearest known model is {nearest}")
