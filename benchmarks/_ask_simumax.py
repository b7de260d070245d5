"""Ask SimuMax: `python _ask_simumax.py CHECKOUT < rows.json`.

Time needs its file of the machine, which has measured operators.  Settings are those of its pipeline for the B200 runs;
interleaved stages exchange without overlap, the only way in which it counts their memory.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

from _ask import main, refuse

SYSTEM = "b200_bf16_ceperm.json"
RECOMPUTED = {"none": None, "selective": "sdp_only", "full": "full_block"}
UNITS = {"ms": 1e-3, "s": 1.0, "us": 1e-6, "min": 60.0, "h": 3600.0}


def seconds(text: str) -> float:
    value, unit = text.split()
    return float(value) * UNITS[unit]


def gibibytes(text: str) -> float:
    value, unit = text.split()
    return float(value) / {"GB": 1, "MB": 2**10}[unit]


def answer(row: dict[str, Any]) -> float:
    wanted = row["wanted"]
    refuse(row, [(wanted == "seconds" and row["machine"] != "b200", "no file of this machine's operators")])
    model = ModelConfig(
        model_type="dense", model_name="row", hidden_size=row["hidden"], head_num=row["heads"],
        kv_head_num=row["kv_heads"], head_size=row["hidden"] // row["heads"], intermediate_size=row["ffn"],
        layer_num=row["layers"], vocab_size=row["vocabulary"], use_swiglu=row["gated"],
    )  # fmt: skip
    is_flash = row["attention"] == "flash"
    strategy = StrategyConfig(
        seq_len=row["length"], micro_batch_size=row["rows"], micro_batch_num=row["microbatches"], dtype="bf16",
        world_size=row["ranks"], tp_size=row["tp"], pp_size=row["pp"], cp_size=row["cp"],
        interleaving_size=row["chunks"], enable_sequence_parallel=row["sequence_parallel"], zero_state=row["zero"],
        enable_dropout=row["dropout"], use_flash_sdp=is_flash, use_math_sdp=not is_flash, pp_comm_async=False,
        cross_entropy_loss_fusion=row["fused_loss"], use_fused_grad_accumulation=row["accumulates"],
        recompute_granularity=RECOMPUTED[row["recompute"]], enable_straggler_model=False,
        recompute_layer_num=row["layers"] // row["pp"] if row["recompute"] != "none" else 0,
        te_version=row["engine"] or None,
    )  # fmt: skip
    tool = PerfLLM()
    system = SystemConfig.init_from_config_file(str(Path(sys.argv[1]) / "configs" / "system" / SYSTEM))
    tool.configure(strategy_config=strategy, model_config=model, system_config=system)
    tool.run_estimate()
    if wanted == "seconds":
        return seconds(tool.analysis_cost().data["duration_time_per_iter"])
    found = tool.analysis_mem()
    if wanted == "activations":
        stage = found.data.get("first_stage", found.data)
        return gibibytes(stage["peak_mem"]) - gibibytes(stage["model_mem"])
    peaks = tool.get_pp_stage_peak_mem(found, "peak_mem", toG=True)
    return peaks["last_stage" if len(peaks) > 1 else "first_stage"] if row["rank"] == "last" else max(peaks.values())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.path.insert(0, sys.argv[1])
    from simumax.core.config import ModelConfig, StrategyConfig, SystemConfig
    from simumax.core.perf_llm import PerfLLM

    main(answer)
