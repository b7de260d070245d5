"""Ask calculon: `python _ask_calculon.py CHECKOUT < rows.json`; machines are its own files, networks as in them."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

from _ask import main, refuse

SYSTEMS = {"a100-80": "a100_80g.json", "h100": "h100_80g_nvl8.json"}
ROOM = 10**6  # GiB: it refuses a plan that does not fit, where a plan has run


def answer(row: dict[str, Any]) -> float:
    refuse(row, [
        (row["cp"] > 1, "no context parallelism"), (row["gated"], "no gated network"),
        (row["kv_heads"] != row["heads"], "no shared key heads"),
        (row["machine"] not in SYSTEMS, "no file of this machine"),
        (row["wanted"] == "peak", "no embedding, no head"),
    ])  # fmt: skip
    app = Llm.Application({
        "hidden": row["hidden"], "feedforward": row["ffn"], "seq_size": row["length"], "attn_heads": row["heads"],
        "attn_size": row["hidden"] // row["heads"], "num_blocks": row["layers"],
    })  # fmt: skip
    is_sharded = row["sequence_parallel"]
    exe = Llm.Execution.from_json({
        "num_procs": row["ranks"], "tensor_par": row["tp"], "pipeline_par": row["pp"], "data_par": row["dp"],
        "tensor_par_net": 0, "pipeline_par_net": 1, "data_par_net": 1, "batch_size": row["batch"],
        "microbatch_size": row["rows"], "datatype": "float16", "fused_activation": False,
        "attention_type": "multihead",
        "activation_recompute": {"selective": "attn_only"}.get(row["recompute"], row["recompute"]),
        "pipeline_interleaving": row["chunks"], "optimizer_sharding": row["zero"] > 0,
        "tensor_par_comm_type": "rs_ag" if is_sharded else "ar", "tensor_par_overlap": "none",
        "seq_par_ag_redo": is_sharded, "data_par_overlap": False, "weight_offload": False,
        "activations_offload": False, "optimizer_offload": False, "training": True,
    })  # fmt: skip
    config = json.loads((Path(sys.argv[1]) / "systems" / SYSTEMS[row["machine"]]).read_text())
    config["mem1"]["GiB"] = ROOM
    system, model = System(config), Llm(app, logging.getLogger())
    model.compile(system, exe)
    model.run(system)
    found = model.get_stats_json(False)
    return found["total_time"] if row["wanted"] == "seconds" else found["act_space"] / 2**30


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    from calculon import System
    from calculon.llm import Llm

    main(answer)
