"""Published rows for `planners.py`: what was run or printed, the inputs that another tool is told, our estimate.

In: the tables of `dualpipe_course.whole.published`, whose modules say where each row was read.  Out: rows.
  B200        peaks and steps of 8 B200 as SimuMax has measured them, dense models, with its published estimates
  Megatron    peaks of its tests, on the last rank
  Korthikanti activations of the first stage and steps on A100 80 GB; `selective` is with sequence parallelism
  MLPerf      steps of Llama 3.1 405B
Inputs are plain numbers and words, so that they can be handed to another process.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dualpipe_course.whole.published import korthikanti, megatron, mlperf, simumax
from dualpipe_lab.models import LlamaConfig
from dualpipe_lab.plan import Cluster, GptConfig, Plan

GIB = 2**30
TABLES = ("B200 peaks", "B200 steps", "Megatron peaks", "Korthikanti activations", "Korthikanti steps", "MLPerf steps")
B200 = {"fused_loss": True, "engine": "2.11.0"}


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


def b200_peaks() -> Iterator[Row]:
    names = {id(model): name for name, model in simumax.MODELS.items()}
    for model, sizes, length, measured, error in [*simumax.MEMORY["dense"], *simumax.MEMORY["cp"]]:
        plan = simumax.memory_plan(model, sizes)
        yield Row(
            "B200 peaks", f"{names[id(model)]} {length} {sizes}",
            inputs_of(model, plan, "b200", length, 4 * plan.dp, **B200, wanted="peak"), measured,
            lambda row=(model, sizes, length): simumax.gibibytes(*row),
            theirs=measured * (1 + error / 100),
        )  # fmt: skip


def b200_steps() -> Iterator[Row]:
    for index, row in enumerate(simumax.STEPS):
        name, tp, pp, dp, cp, length, runs = row
        for count, (measured, error) in runs.items():
            model, plan, batch = simumax.MODELS[name], simumax.step_plan(row, count), count * dp
            given = simumax.CALIBRATION.get((index, count))

            def ours(row: simumax.Step = row, count: int = count) -> float:
                return simumax.plain_seconds(row, count)

            def fitted(row: simumax.Step = row, count: int = count) -> float:
                return simumax.milliseconds(row, count, **simumax.machine()) / 1e3

            yield Row(
                "B200 steps", f"{name} {length} tp {tp} pp {pp} dp {dp} cp {cp} m {count}",
                inputs_of(model, plan, "b200", length, batch, **B200, wanted="seconds"), measured / 1e3, ours, fitted,
                measured / 1e3 * (1 + error / 100), "b200", given == "products", given is not None,
            )  # fmt: skip


def megatron_peaks() -> Iterator[Row]:
    for name, gold, _, peak in megatron.ROWS:
        case = megatron.case_of(name)
        if case is None or not isinstance(case.model, GptConfig):
            continue
        batch = case.rows * case.plan.dp * case.plan.num_microbatches
        inputs = inputs_of(
            case.model, case.plan, "h100", case.length, batch, wanted="peak", dropout=True, accumulates=False,
            rank="last",
        )  # fmt: skip
        yield Row(
            "Megatron peaks", f"{name.split('/')[1]} {gold}", inputs, peak / GIB,
            lambda case=case, gold=gold: case.estimate(gold).allocated / GIB,
        )  # fmt: skip


def paper_activations() -> Iterator[Row]:
    for row in korthikanti.ACTIVATION_ROWS:
        inputs = _paper_inputs(row, wanted="activations", rank="first")
        yield Row(
            "Korthikanti activations", f"{row.name} {row.kind}", inputs, row.published,
            lambda row=row: korthikanti.gibibytes(row),
        )  # fmt: skip


def paper_steps() -> Iterator[Row]:
    for number, row in enumerate(korthikanti.STEP_ROWS):
        yield Row(
            "Korthikanti steps", f"{row.name} {row.kind}", _paper_inputs(row, wanted="seconds"), row.published,
            lambda row=row: korthikanti.seconds(row), machine="a100", gives=not number, is_used=not number,
        )  # fmt: skip


def _paper_inputs(row: korthikanti.Row, **more: Any) -> dict[str, Any]:
    return inputs_of(
        row.model, row.plan, "a100-80", 2048, korthikanti.BATCH[row.name], attention="plain", dropout=True,
        recompute=row.kind, **more,
    )  # fmt: skip


def mlperf_steps() -> Iterator[Row]:
    for machine, (_, rows) in mlperf.SERIES.items():
        for number, row in enumerate(rows):
            inputs = inputs_of(
                mlperf.LLAMA_405B, mlperf.plan_of(machine, row), machine, 8192, row[2], wanted="seconds",
                products="float8", per_node=mlperf.NODES[machine],
            )  # fmt: skip
            yield Row(
                "MLPerf steps", f"{machine} {row[0]}", inputs, row[3],
                lambda machine=machine, row=row: mlperf.estimated(machine, row).seconds, machine=machine,
                gives=not number, is_used=not number,
            )  # fmt: skip


def all_rows() -> list[Row]:
    """Every row, table by table."""
    return [*b200_peaks(), *b200_steps(), *megatron_peaks(), *paper_activations(), *paper_steps(), *mlperf_steps()]
