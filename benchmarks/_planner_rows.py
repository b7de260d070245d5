"""Published rows for `planners.py`: what was run or printed, the inputs that another tool is told, our estimate.

In: the tables of tests/plan, whose files say where each row was read.  Out: rows.
  B200        peaks and steps of 8 B200 as SimuMax has measured them, dense models, with its published estimates
  Megatron    peaks of its tests, on the last rank
  Korthikanti activations of the first stage in figure 1, which follow from formulas, as calculon's validation.py at
              caa4b11f has read them off, and steps of table 5, A100 80 GB; `selective` is with sequence parallelism
  MLPerf      steps of Llama 3.1 405B
Inputs are plain numbers and words, so that they can be handed to another process.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dualpipe_lab.models import LlamaConfig
from dualpipe_lab.plan import (
    KORTHIKANTI,
    KORTHIKANTI_SELECTIVE,
    MEGATRON_TIME,
    Cluster,
    GptConfig,
    Plan,
    estimate,
    step_time,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "plan"))
import test_megatron_memory as golden
import test_published_memory as memory
import test_published_steps as steps
import test_published_times as times

GIB = 2**30
TABLES = ("B200 peaks", "B200 steps", "Megatron peaks", "Korthikanti activations", "Korthikanti steps", "MLPerf steps")
# Korthikanti et al.: GiB without and with selective recomputation, seconds with full and selective, chunks of a rank
PAPER = {
    "22B": (59.25, 9.5625, 1.42, 1.10, None),
    "175B": (66.84375, 12.3515625, 18.13, 13.75, 3),
    "530B": (114.0234375, 23.076171875, 49.05, 37.83, 3),
    "1T": (131.25, 26.5625, 94.42, 71.49, None),
}
SEQUENCES = {"22B": 4, "175B": 64, "530B": 280, "1T": 512}


@dataclass(frozen=True)
class Row:
    """One published figure.

    Attributes:
        table: that it stands in.
        name: of the row, unique in its table.
        inputs: of a tool.
        published: GiB or seconds.
        ours: our estimate, as it comes; without a number of this machine.
        fitted: our estimate with the three numbers of the B200 machine.
        theirs: the figure that SimuMax has published for it.
        machine: rows of one machine share a factor.
        gives: the factor is that of this row.
        is_used: it gave a factor or a number of a machine, so no error is counted.
    """

    table: str
    name: str
    inputs: dict[str, Any]
    published: float
    ours: Callable[[], float]
    fitted: Callable[[], float] | None = None
    theirs: float | None = None
    machine: str = ""
    gives: bool = False
    is_used: bool = False


def inputs_of(model: LlamaConfig | GptConfig, plan: Plan, machine: str, length: int, batch: int, **more: Any) -> dict:
    """What a tool is told of a row."""
    is_gpt, cluster = isinstance(model, GptConfig), Cluster.of(machine, plan.world_size, more.get("per_node"))
    sizes = model.outline if is_gpt else model
    return {
        "vocabulary": sizes.vocabulary_size, "hidden": sizes.hidden_size, "ffn": sizes.ffn_size,
        "layers": sizes.num_layers, "heads": sizes.num_heads, "kv_heads": sizes.num_kv_heads, "gated": not is_gpt,
        "biases": is_gpt, "tied": sizes.tied, "positions": (model.num_positions or 0) if is_gpt else 0,
        "pp": plan.pp, "dp": plan.dp, "tp": plan.tp, "cp": plan.cp, "chunks": plan.chunks or 1,
        "ranks": plan.world_size, "zero": plan.zero, "sequence_parallel": plan.sequence_parallel,
        "microbatches": plan.num_microbatches, "rows": batch // plan.dp // plan.num_microbatches, "length": length,
        "batch": batch, "machine": machine, "peak": cluster.accelerator.peaks["bfloat16"],
        "memory": cluster.accelerator.memory_bytes, "bandwidth": cluster.accelerator.memory_bandwidth,
        "inside": cluster.inside.bandwidth, "between": cluster.between.bandwidth, "per_node": cluster.ranks_per_node,
        "recompute": "none", "attention": "flash", "dropout": False, "products": "bfloat16", "fused_loss": False,
        "accumulates": True, "rank": "largest", "engine": "",
    } | more  # fmt: skip


def even(model: LlamaConfig | GptConfig, num_stages: int) -> tuple[int, ...]:
    """As many layers on every stage, as Megatron has them."""
    return (model.num_layers // num_stages,) * num_stages


def b200_peaks() -> Iterator[Row]:
    for kind in ("dense", "cp"):
        for model, sizes, length, measured, error in memory.SIMUMAX[kind]:
            name = f"{'70B' if model is memory.LLAMA_70B else '405B'} {length} {sizes}"
            plan = Plan(
                **sizes, num_microbatches=4, precision="bfloat16", sequence_parallel=sizes["tp"] > 1,
                zero=int(sizes.get("dp", 1) * sizes.get("cp", 1) > 1), layers=even(model, sizes.get("pp", 1)),
            )  # fmt: skip
            inputs = inputs_of(model, plan, "b200", length, 4 * plan.dp, **B200, wanted="peak")
            yield Row(
                "B200 peaks", name, inputs, measured, _peak(model, plan, "b200", length, 4 * plan.dp),
                theirs=measured * (1 + error / 100),
            )  # fmt: skip


B200 = {"fused_loss": True, "engine": "2.11.0"}


def _peak(model: LlamaConfig, plan: Plan, machine: str, length: int, batch: int) -> Callable[[], float]:
    cluster, rules = Cluster.of(machine, plan.world_size), memory.SIMUMAX_RULES
    return lambda: estimate(model, plan, cluster, length, batch, rules).largest.allocated / GIB


def b200_steps() -> Iterator[Row]:
    for index, row in enumerate(steps.ROWS):
        name, tp, pp, dp, cp, length, runs = row
        for count, (measured, error) in runs.items():
            plan = Plan(
                pp=pp, tp=tp, dp=dp, cp=cp, zero=int(dp * cp > 1), num_microbatches=count, precision="bfloat16",
                sequence_parallel=tp > 1, layers=even(steps.MODELS[name], pp),
            )  # fmt: skip
            inputs = inputs_of(steps.MODELS[name], plan, "b200", length, count * dp, **B200, wanted="seconds")
            given = steps.CALIBRATION.get((index, count))
            yield Row(
                "B200 steps", f"{name} {length} tp {tp} pp {pp} dp {dp} cp {cp} m {count}", inputs, measured / 1e3,
                _seconds(steps.MODELS[name], plan, "b200", None, length, count * dp, NO_OVERLAP),
                lambda row=row, count=count: steps.milliseconds(row, count, **steps.machine()) / 1e3,
                measured / 1e3 * (1 + error / 100), "b200", given == "products", given is not None,
            )  # fmt: skip


NO_OVERLAP = replace(MEGATRON_TIME, tensor_hidden=0.0)


def _seconds(
    model: LlamaConfig | GptConfig, plan: Plan, machine: str, node: int | None, length: int, batch: int, rules: Any
) -> Callable[[], float]:
    return lambda: step_time(model, plan, Cluster.of(machine, plan.world_size, node), length, batch, rules).seconds


def megatron_peaks() -> Iterator[Row]:
    for one in golden.modelled():
        case = golden.case_of(one)
        if not isinstance(case.model, GptConfig):
            continue
        batch = case.rows * case.plan.dp * case.plan.num_microbatches
        inputs = inputs_of(
            case.model, case.plan, "h100", case.length, batch, wanted="peak", dropout=True, accumulates=False,
            rank="last",
        )  # fmt: skip
        yield Row(
            "Megatron peaks", f"{one['case'].split('/')[1]} {one['gold']}", inputs, int(one["mem_max"]) / GIB,
            lambda case=case, gold=one["gold"]: case.estimate(gold).allocated / GIB,
        )  # fmt: skip


def korthikanti() -> Iterator[Row]:
    """Both tables of the paper, for each of its models."""
    for name, (none, selective, slow, fast, chunks) in PAPER.items():
        *_, tp, pp, rows = memory.PAPER[name]
        model, batch = memory.gpt(name), SEQUENCES[name]
        plan = Plan(
            pp=pp, tp=tp, num_microbatches=batch // rows, precision="bfloat16", chunks=chunks,
            schedule="interleaved" if chunks else "1f1b", layers=even(model, pp * (chunks or 1)),
        )  # fmt: skip
        sharded, again = replace(plan, sequence_parallel=True), replace(plan, recompute=True)
        for kind, one, rules, published in (
            ("none", plan, KORTHIKANTI, none), ("selective", sharded, KORTHIKANTI_SELECTIVE, selective)
        ):  # fmt: skip
            inputs = _paper_inputs(model, one, batch, recompute=kind, wanted="activations", rank="first")
            yield Row(
                "Korthikanti activations", f"{name} {kind}", inputs, published,
                lambda model=model, one=one, rules=rules, batch=batch: (
                    estimate(model, one, Cluster.of("a100-80", one.world_size), 2048, batch, rules).of(0).peak.layers
                    / GIB
                ),
            )  # fmt: skip
        for kind, one, published in (("full", again, slow), ("selective", sharded, fast)):
            inputs = _paper_inputs(model, one, batch, recompute=kind, wanted="seconds")
            is_first = (name, kind) == ("22B", "full")
            yield Row(
                "Korthikanti steps", f"{name} {kind}", inputs, published,
                _seconds(model, one, "a100-80", None, 2048, batch, NO_OVERLAP), machine="a100", gives=is_first,
                is_used=is_first,
            )  # fmt: skip


def _paper_inputs(model: GptConfig, plan: Plan, batch: int, **more: Any) -> dict[str, Any]:
    return inputs_of(model, plan, "a100-80", 2048, batch, attention="plain", dropout=True, **more)


def mlperf_steps() -> Iterator[Row]:
    for machine, (tp, rows) in times.SERIES.items():
        for number, (num_ranks, dp, batch, seconds) in enumerate(rows):
            plan = Plan(
                pp=8, dp=dp, tp=tp, cp=2, schedule="interleaved", chunks=8, num_microbatches=batch // dp, zero=1,
                sequence_parallel=True, precision="bfloat16", layers=times.LAYERS,
            )  # fmt: skip
            inputs = inputs_of(
                times.LLAMA_405B, plan, machine, 8192, batch, wanted="seconds", products="float8",
                per_node=times.NODES[machine],
            )  # fmt: skip
            yield Row(
                "MLPerf steps", f"{machine} {num_ranks}", inputs, seconds,
                lambda row=(machine, tp, num_ranks, dp, batch): times.predicted(*row).seconds, machine=machine,
                gives=not number, is_used=not number,
            )  # fmt: skip


def all_rows() -> list[Row]:
    """Every row, table by table."""
    found = [*b200_peaks(), *b200_steps(), *megatron_peaks(), *korthikanti(), *mlperf_steps()]
    return sorted(found, key=lambda row: TABLES.index(row.table))
