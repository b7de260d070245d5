"""GPTs of 1.7 to 1,008 billion parameters on up to 3,072 A100 80 GB, and ZeRO-3 beside pipelines: seconds of a step.

Chapter: book/whole/predictions.  Sequences of 2,048, a vocabulary of 51,200, 16-bit numbers, all layers run again in
the backward.  The paper prints TFLOP/s of a GPU, a whole number; a step's seconds follow from its own count of FLOPs,
96 B s l h^2 (1 + s / 6h + V / 16lh), which has the repeated forward.
  rules      unfused attention; torch's DDP, which sums gradients behind the last backward, on one stage alone
  left out   ranks of tp send a part of a message each and gather it behind; here each of them sends all of it
  assumed    pipelines of table 2 have 1F1B and microbatches of one row: their losses on more GPUs are its bubbles'
Source: Narayanan et al. 2021 (arXiv 2104.04473), section 3 and tables 1 and 2; microbatches and chunks of table 1 from
Megatron-LM, examples/sc21/run_table_1.sh, commit 79a3bb6b.
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from dualpipe_course.whole.published import Pair
from dualpipe_course.whole.published.fits import solve
from dualpipe_lab.plan import MEGATRON_TIME, Cluster, GptConfig, Plan, TimeRules, step_time

LENGTH, VOCABULARY = 2048, 51_200
SIZES = {  # layers, h, heads by 10^9 parameters
    1.7: (24, 2304, 24), 3.6: (30, 3072, 32), 7.5: (36, 4096, 32), 18.4: (40, 6144, 48), 39.1: (48, 8192, 64),
    76.1: (60, 10240, 80), 145.6: (80, 12288, 96), 174.6: (96, 12288, 96), 310.1: (96, 16384, 128),
    529.6: (105, 20480, 128), 1008.0: (128, 25600, 160),
}  # fmt: skip
RULES: TimeRules = replace(MEGATRON_TIME, tensor_hidden=0.0, hides_gradients=False, core="unfused")


class Row(NamedTuple):
    """A published run: `rows` of a microbatch, TFLOP/s of a GPU."""

    billions: float
    num_gpus: int
    batch: int
    tp: int
    pp: int
    chunks: int
    rows: int
    teraflops: float
    zero: int = 0

    @property
    def model(self) -> GptConfig:
        """What was trained."""
        layers, hidden, heads = SIZES[self.billions]
        return GptConfig(VOCABULARY, hidden, layers, heads, num_positions=LENGTH)

    @property
    def plan(self) -> Plan:
        """How it was cut."""
        dp, stages = self.num_gpus // (self.tp * self.pp), self.pp * self.chunks
        return Plan(
            pp=self.pp, dp=dp, tp=self.tp, zero=self.zero, num_microbatches=self.batch // (dp * self.rows),
            schedule="interleaved" if self.chunks > 1 else "1f1b", chunks=self.chunks if self.chunks > 1 else None,
            layers=(SIZES[self.billions][0] // stages,) * stages, precision="bfloat16", recompute=True,
        )  # fmt: skip

    @property
    def published(self) -> float:
        """Seconds of the step that the printed TFLOP/s say."""
        layers, hidden, _ = SIZES[self.billions]
        terms = 1 + LENGTH / (6 * hidden) + VOCABULARY / (16 * layers * hidden)
        flops = 96 * self.batch * LENGTH * layers * hidden**2 * terms
        return flops / (self.teraflops * 1e12 * self.num_gpus)

    @property
    def name(self) -> str:
        """The model, the GPUs and the way it was cut."""
        return f"{self.billions:6.1f}B on {self.num_gpus:4}: " + (
            "ZeRO-3" if self.zero else f"tp {self.tp} pp {self.pp}"
        )


TABLE_1 = (
    Row(1.7, 32, 512, 1, 1, 1, 16, 137),
    Row(3.6, 64, 512, 2, 1, 1, 16, 138),
    Row(7.5, 128, 512, 4, 1, 1, 16, 142),
    Row(18.4, 256, 1024, 8, 1, 1, 8, 135),
    Row(39.1, 512, 1536, 8, 2, 1, 4, 138),
    Row(76.1, 1024, 1792, 8, 4, 3, 2, 140),
    Row(145.6, 1536, 2304, 8, 8, 2, 2, 148),
    Row(310.1, 1920, 2160, 8, 16, 2, 1, 155),
    Row(529.6, 2520, 2520, 8, 35, 3, 1, 163),
    Row(1008.0, 3072, 3072, 8, 64, 1, 1, 163),
)
PIPELINES = (
    Row(174.6, 384, 1536, 8, 12, 1, 1, 153),
    Row(174.6, 768, 1536, 8, 12, 1, 1, 149),
    Row(174.6, 1536, 1536, 8, 12, 1, 1, 141),
    Row(529.6, 560, 2240, 8, 35, 1, 1, 171),
    Row(529.6, 1120, 2240, 8, 35, 1, 1, 167),
    Row(529.6, 2240, 2240, 8, 35, 1, 1, 159),
)
ZERO_3 = (
    Row(174.6, 384, 1536, 1, 1, 1, 4, 144, zero=3),
    Row(174.6, 768, 1536, 1, 1, 1, 2, 88, zero=3),
    Row(174.6, 1536, 1536, 1, 1, 1, 1, 44, zero=3),
    Row(529.6, 640, 2560, 1, 1, 1, 4, 138, zero=3),
    Row(529.6, 1120, 2240, 1, 1, 1, 2, 98, zero=3),
    Row(529.6, 2240, 2240, 1, 1, 1, 1, 48, zero=3),
)


def seconds(row: Row, links: float = 1.0) -> float:
    """A step by the table of accelerators.

    Args:
        row: of either table.
        links: the part of the links between nodes that is reached.
    """
    cluster = Cluster.of("a100-80", row.num_gpus)
    cluster = replace(cluster, between=replace(cluster.between, bandwidth=cluster.between.bandwidth * links))
    rules = replace(RULES, hides_gradients=row.pp == 1 and not row.zero)
    return step_time(row.model, row.plan, cluster, LENGTH, row.batch, rules).seconds


@cache
def pairs(with_factor: bool = False) -> list[Pair]:
    """Seconds of table 1 and of table 2's pipelines; times one factor, that of the first row."""
    found = [Pair(row.name, row.published, seconds(row)) for row in (*TABLE_1, *PIPELINES)]
    factor = found[0].published / found[0].estimated if with_factor else 1.0
    return [
        Pair(pair.name, pair.published, pair.estimated * factor, with_factor and not number)
        for number, pair in enumerate(found)
    ]


@cache
def zero_3(with_links: bool = False) -> list[Pair]:
    """Seconds of ZeRO-3; with the part of the links at which the third row is met."""
    point = ZERO_3[2]
    links = solve(lambda part: seconds(point, part), point.published, 0.01, 1.0) if with_links else 1.0
    return [Pair(row.name, row.published, seconds(row, links), with_links and row is point) for row in ZERO_3]
