"""Ask Megatron-LM's theoretical_memory_usage.py: `python _ask_megatron.py CHECKOUT < rows.json`.

The file is read alone, with two functions of its package in place of the package, so it needs neither torch nor GPU.
What it prints at the start of a run is the answer: the rank that it takes for the most loaded.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from _ask import main, refuse


def load(folder: str) -> Any:
    utils = ModuleType("megatron_alone.utils")
    utils.is_hybrid_model = lambda args: False  # type: ignore[attr-defined]
    utils.print_rank_0 = print  # type: ignore[attr-defined]
    sys.modules |= {"megatron_alone": ModuleType("megatron_alone"), "megatron_alone.utils": utils}
    file = Path(folder) / "megatron" / "training" / "theoretical_memory_usage.py"
    spec = importlib.util.spec_from_file_location("megatron_alone.memory", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(row: dict[str, Any]) -> float:
    refuse(row, [
        (row["wanted"] == "seconds", "no estimate of time"), (row["cp"] > 1, "no context parallelism"),
    ])  # fmt: skip
    args = SimpleNamespace(
        kv_channels=row["hidden"] // row["heads"], num_attention_heads=row["heads"], hidden_size=row["hidden"],
        group_query_attention=row["kv_heads"] != row["heads"], num_query_groups=row["kv_heads"], num_experts=None,
        swiglu=row["gated"], moe_shared_expert_intermediate_size=None, num_layers=row["layers"], mtp_num_layers=None,
        normalization="RMSNorm" if row["gated"] else "LayerNorm", multi_latent_attention=False, moe_latent_size=None,
        padded_vocab_size=row["vocabulary"], untie_embeddings_and_output_weights=not row["tied"],
        ffn_hidden_size=row["ffn"], add_bias_linear=row["biases"], expert_tensor_parallel_size=row["tp"],
        expert_model_parallel_size=1, pipeline_model_parallel_size=row["pp"], tensor_model_parallel_size=row["tp"],
        world_size=row["ranks"], data_parallel_size=row["dp"], use_distributed_optimizer=row["zero"] > 0,
        virtual_pipeline_model_parallel_size=row["chunks"] if row["chunks"] > 1 else None, seq_length=row["length"],
        micro_batch_size=row["rows"], sequence_parallel=row["sequence_parallel"],
        recompute_granularity={"none": None}.get(row["recompute"], row["recompute"]), moe_router_topk=2,
    )  # fmt: skip
    _, activations, total = TOOL.report_theoretical_memory(args, num_microbatches=row["microbatches"])
    return (activations if row["wanted"] == "activations" else total) / 1024


if __name__ == "__main__":
    TOOL = load(sys.argv[1])
    main(answer)
