"""Korthikanti's four GPTs on A100 80 GB: activations of the first stage and seconds of a step.

Chapter: book/whole/predictions.  Sequences of 2,048, a vocabulary of 51,200, tp 8, three interleaved stages of a rank
for two of the models; selective recomputation is with sequence parallelism.  Attention is unfused: it writes scores.
Source: Korthikanti et al. 2022 (arXiv 2205.05198), tables 3 to 5; figure 1, a plot of what the paper's formulas say, as
calculon-ai/calculon validation.py, commit caa4b11f, has read it off.
"""

from dataclasses import replace
from typing import NamedTuple

from dualpipe_lab.plan import (
    KORTHIKANTI,
    KORTHIKANTI_SELECTIVE,
    MEGATRON_TIME,
    Cluster,
    GptConfig,
    Plan,
    StepTimer,
    estimate,
    step_time,
)

# table 3: layers, h, a, tp, pp, rows of a microbatch
SIZES = {
    "22B": (48, 6144, 64, 8, 1, 4),
    "175B": (96, 12288, 96, 8, 8, 1),
    "530B": (105, 20480, 128, 8, 35, 1),
    "1T": (128, 25600, 160, 8, 64, 1),
}
BATCH = {"22B": 4, "175B": 64, "530B": 280, "1T": 512}
CHUNKS = {"175B": 3, "530B": 3}
ACTIVATIONS = {  # GiB without recomputation, and with the selective one
    "22B": (59.25, 9.5625),
    "175B": (66.84375, 12.3515625),
    "530B": (114.0234375, 23.076171875),
    "1T": (131.25, 26.5625),
}
STEPS = {"22B": (1.42, 1.10), "175B": (18.13, 13.75), "530B": (49.05, 37.83), "1T": (94.42, 71.49)}  # full, selective
LAYER = {  # table 4: one layer of the 22B, ms forward and backward; sequence parallel, what is recomputed
    (False, "none"): (7.7, 11.9),
    (True, "none"): (7.2, 11.8),
    (False, "full"): (7.7, 19.5),
    (False, "selective"): (7.7, 13.2),
    (True, "selective"): (7.2, 13.1),
}
STEP_RULES = replace(MEGATRON_TIME, tensor_hidden=0.0, core="unfused")  # of 2022, before flash kernels
SELECTIVE_RULES = replace(STEP_RULES, recomputes=frozenset({"core_attn"}))


class Row(NamedTuple):
    """A model under a kind of recomputation: `none`, `selective` or `full`."""

    name: str
    kind: str
    published: float

    @property
    def model(self) -> GptConfig:
        """What was trained."""
        return gpt(self.name)

    @property
    def plan(self) -> Plan:
        """How the model was cut."""
        return plan_of(self.name, self.kind)


def gpt(name: str) -> GptConfig:
    """A model of the paper."""
    layers, hidden, heads, *_ = SIZES[name]
    return GptConfig(51200, hidden, layers, heads, num_positions=2048)


def plan_of(name: str, kind: str) -> Plan:
    """The plan of a model; what is recomputed selectively is a rule of what layers keep, and no field of the plan."""
    layers, _, _, tp, pp, rows = SIZES[name]
    chunks = CHUNKS.get(name)
    stages = pp * (chunks or 1)
    return Plan(
        pp=pp, tp=tp, num_microbatches=BATCH[name] // rows, precision="bfloat16", chunks=chunks,
        schedule="interleaved" if chunks else "1f1b", layers=(layers // stages,) * stages,
        sequence_parallel=kind == "selective", recompute=kind == "full",
    )  # fmt: skip


def rows_of(table: dict[str, tuple[float, float]], *kinds: str) -> list[Row]:
    """The rows of one of the tables, whose columns are these kinds."""
    return [Row(name, kind, value) for name, values in table.items() for kind, value in zip(kinds, values, strict=True)]


ACTIVATION_ROWS = rows_of(ACTIVATIONS, "none", "selective")
STEP_ROWS = rows_of(STEPS, "full", "selective")


def gibibytes(row: Row) -> float:
    """What the layers of the first rank keep at its peak."""
    plan, rules = row.plan, KORTHIKANTI_SELECTIVE if row.kind == "selective" else KORTHIKANTI
    found = estimate(row.model, plan, Cluster.of("a100-80", plan.world_size), 2048, BATCH[row.name], rules)
    return found.of(0).peak.layers / 2**30


def layer_milliseconds(is_sharded: bool, kind: str) -> tuple[float, float]:
    """Forward and backward of one layer of the 22B."""
    plan = replace(plan_of("22B", kind), sequence_parallel=is_sharded)
    rules = SELECTIVE_RULES if kind == "selective" else STEP_RULES
    timer = StepTimer(gpt("22B"), replace(plan, layers=None), Cluster.of("a100-80", 8), 2048, BATCH["22B"], rules)
    layer = {name: sum(spent.values()) * 1e3 for name, spent in timer.times.layer(0).items()}
    return layer["F"], layer["I"] + layer["W"]


def seconds(row: Row) -> float:
    """A step, with the recomputation that the row had: of full layers, or of attention between its products."""
    plan, rules = row.plan, SELECTIVE_RULES if row.kind == "selective" else STEP_RULES
    cluster = Cluster.of("a100-80", plan.world_size)
    return step_time(row.model, plan, cluster, 2048, BATCH[row.name], rules).seconds
