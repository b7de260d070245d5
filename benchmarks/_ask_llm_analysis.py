"""Ask llm-analysis: `python _ask_llm_analysis.py CHECKOUT < rows.json`; it is told the peaks of the machine.

Its efficiencies are inputs, 1 unless given: steps are lower bounds as they come.
"""

import logging
import sys
from typing import Any

from _ask import main, refuse


def answer(row: dict[str, Any]) -> float:
    refuse(row, [(row["cp"] > 1, "no context parallelism"), (row["products"] == "float8", "no 8-bit floats")])
    model = ModelConfig(
        "row", row["layers"], row["heads"], row["hidden"], row["vocabulary"], max_seq_len=row["length"],
        num_key_value_heads=row["kv_heads"], ffn_embed_dim=row["ffn"], mlp_gated_linear_units=row["gated"],
    )  # fmt: skip
    card = GPUConfig(
        row["machine"], row["memory"] / 1e9, row["bandwidth"] / 1e9, row["inside"] / 1e9, 8e-6, row["peak"] / 1e12,
        inter_node_bandwidth_in_GB_per_sec=row["between"] / 1e9,
    )  # fmt: skip
    sizes = ParallelismConfig(
        tp_size=row["tp"], pp_size=row["pp"], dp_size=row["dp"], sp_size=row["tp"] if row["sequence_parallel"] else 1
    )
    kinds = {"none": "NONE", "selective": "ATTN_COMPUTE", "full": "FULL"}
    found = LLMAnalysis(model, card, get_dtype_config_by_name("w16a16e16"), sizes).training(
        batch_size_per_gpu=row["rows"], gradient_accumulation_steps=row["microbatches"], seq_len=row["length"],
        activation_recomputation=ActivationRecomputation[kinds[row["recompute"]]],
        ds_zero=DSZeRO(row["zero"]), flash_attn=row["attention"] == "flash",
        softmax_dropout=row["attention"] == "plain" and row["dropout"],
    )  # fmt: skip
    if row["wanted"] == "seconds":
        return found["latency_per_iter"]
    if row["wanted"] == "peak":
        return found["estimated_peak_memory_per_gpu"] / 2**30
    return sum(found[f"activation_memory_{part}_per_gpu"] for part in ("attn", "mlp", "layernorm")) / 2**30


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
    from llm_analysis.config import GPUConfig, ModelConfig, ParallelismConfig, get_dtype_config_by_name
    from llm_analysis.logger import logger

    logger.setLevel(logging.ERROR)
    main(answer)
