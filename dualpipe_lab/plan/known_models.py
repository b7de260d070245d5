"""`KNOWN_MODELS`: the values of published models, by their names in a config.json, with sources and published sizes.

In: nothing, and nothing is downloaded.  Out: a table; `model_of` reads it.
Values that change no size, such as the ids of special tokens, are left out.
Elsewhere: SimuMax's `configs/models`; calculon's `models`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class KnownModel(NamedTuple):
    """A published model.

    Attributes:
        values: of its config.json, by their names there.
        published: the number of its parameters, with the digits that are printed, and without a second token's layers.
        source: where the values were read.
        date: of the source, as year-month.
    """

    values: Mapping[str, Any]
    published: str
    source: str
    date: str


_TITAN = "pytorch/torchtitan, torchtitan/models, commit b5bcd76c"
_LLAMA3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
_LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA32: dict[str, Any] = {"tie_word_embeddings": True, "rope_scaling": _LLAMA31 | {"factor": 32.0}}
_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
_QWEN3_DENSE = _QWEN3 | {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 8}
_QWEN3_MOE = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def _sizes(hidden: int, ffn: int, layers: int, heads: int) -> dict[str, Any]:
    """Return the sizes that all but a GPT have, by their names."""
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


_8B, _70B, _405B = _sizes(4096, 14336, 32, 32), _sizes(8192, 28672, 80, 64), _sizes(16384, 53248, 126, 128)
KNOWN_MODELS: dict[str, KnownModel] = {
    "llama3-8b": KnownModel(
        _LLAMA3 | _8B,
        "8.03e9",
        "kevinstephano/thunder_model_blocks, llama_3_8B_Instruct_config.py, commit 5c083b0e",
        "2025-05",
    ),
    "llama3-70b": KnownModel(_LLAMA3 | _70B, "70.6e9", f"{_TITAN}/llama3: 70B", "2026-08"),
    "llama3-405b": KnownModel(
        _LLAMA3 | _405B,
        "405.9e9",
        "Grattafiori et al. 2024 (arXiv 2407.21783), table 3; before its long context",
        "2024-07",
    ),
    "llama3.1-8b": KnownModel(_LLAMA3 | _8B | {"rope_scaling": _LLAMA31}, "8.03e9", f"{_TITAN}/llama3: 8B", "2026-08"),
    "llama3.1-70b": KnownModel(
        _LLAMA3 | _70B | {"rope_scaling": _LLAMA31}, "70.6e9", f"{_TITAN}/llama3: 70B", "2026-08"
    ),
    "llama3.1-405b": KnownModel(
        _LLAMA3 | _405B | {"rope_scaling": _LLAMA31}, "405.9e9", f"{_TITAN}/llama3: 405B", "2026-08"
    ),
    "llama3.2-1b": KnownModel(
        _LLAMA3 | _sizes(2048, 8192, 16, 32) | _LLAMA32 | {"head_dim": 64},
        "1.24e9",
        "kevinstephano/thunder_model_blocks, llama_config.py, commit 5c083b0e",
        "2025-05",
    ),
    "llama3.2-3b": KnownModel(
        _LLAMA3 | _sizes(3072, 8192, 28, 24) | _LLAMA32 | {"head_dim": 128},
        "3.21e9",
        "citsjtu2020/LLM-Prof, sglang/Model_Config.md; torchtitan's llama3 3B has the same sizes",
        "2026-08",
    ),
    "qwen3-8b": KnownModel(_QWEN3_DENSE | _sizes(4096, 12288, 36, 32), "8.2e9", f"{_TITAN}/qwen3: 8B", "2026-08"),
    "qwen3-14b": KnownModel(_QWEN3_DENSE | _sizes(5120, 17408, 40, 40), "14.8e9", f"{_TITAN}/qwen3: 14B", "2026-08"),
    "qwen3-32b": KnownModel(_QWEN3_DENSE | _sizes(5120, 25600, 64, 64), "32.8e9", f"{_TITAN}/qwen3: 32B", "2026-08"),
    "qwen3-30b-a3b": KnownModel(
        _QWEN3_MOE | _sizes(2048, 6144, 48, 32) | {"moe_intermediate_size": 768},
        "30.5e9",
        f"{_TITAN}/qwen3: 30B-A3B; zyzshishui/slime, scripts/models/qwen3-30B-A3B.sh",
        "2026-08",
    ),
    "qwen3-235b-a22b": KnownModel(
        _QWEN3_MOE | _sizes(4096, 12288, 94, 64) | {"moe_intermediate_size": 1536},
        "235.1e9",
        f"{_TITAN}/qwen3: 235B-A22B; zyzshishui/slime, scripts/models/qwen3-235B-A22B.sh for the angles",
        "2026-08",
    ),
    "mixtral-8x7b": KnownModel(
        {
            "architectures": ["MixtralForCausalLM"],
            "vocab_size": 32000,
            **_sizes(4096, 14336, 32, 32),
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
        "46.7e9",
        "huggingface/candle, src/models/mixtral.rs, commit 07c6edb2; transformers 5.23 MixtralConfig",
        "2026-08",
    ),
    "deepseek-v3": KnownModel(
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "vocab_size": 129280,
            **_sizes(7168, 18432, 61, 128),
            "num_key_value_heads": 128,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "tie_word_embeddings": False,
        },
        "671.0e9",
        f"transformers 5.23 DeepseekV3Config; {_TITAN}/deepseek_v3: 671B for the angles",
        "2026-08",
    ),
    "gpt3-175b": KnownModel(
        {
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": 50257,
            "n_embd": 12288,
            "n_layer": 96,
            "n_head": 96,
            "n_positions": 2048,
        },
        "174.6e9",
        "Brown et al. 2020 (arXiv 2005.14165), tables 2.1 and D.1; the vocabulary is GPT-2's",
        "2020-05",
    ),
}
