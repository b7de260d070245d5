"""52 ranks that trained OPT-350M, in MiB: what each holds behind a step and at its peak, beside the estimate.

Chapter: book/whole/predictions.  Four GH200 of a node, 32-bit numbers, tp 4, 1F1B, nothing recomputed, sequences of
2,048; no number is fitted to these bytes (the reserve was fitted to what the allocator adds to them, and is left out).
A GPT of OPT-350M's sizes stands for it, with these differences:
  stages       Aceso cuts between operations, not layers: a plan with pp 4 has 79, 84, 87 and 65 of them on its stages;
               here a stage has full layers, so that each of four has 6
  table        the vocabulary is not given: 51,200 rows, of 50,272 in OPT as published, are 3.6 MiB more on a rank
  behind step  64 to 202 MiB of a rank are in no state; what they hold is not known
Source: eth-easl/sailor, OPT-350/memory/csv, commit 16eebd41 (2025-08-18); Strati et al. 2025 (arXiv 2504.17096).
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from dualpipe_course.whole.published import Pair
from dualpipe_lab.plan import KORTHIKANTI, Cluster, Estimate, GptConfig, Plan, estimate

OPT_350M = GptConfig(51200, 1024, 24, 16, num_positions=2048)
_MIB = 2**20


class Stage(NamedTuple):
    """The ranks of a stage of a plan; `rows` of a microbatch."""

    batch: int
    dp: int
    pp: int
    rows: int
    stage: int

    @property
    def plan(self) -> Plan:
        """The plan, with as many layers on each stage."""
        return Plan(
            pp=self.pp, dp=self.dp, tp=4, num_microbatches=self.batch // self.dp // self.rows,
            layers=(OPT_350M.num_layers // self.pp,) * self.pp,
        )  # fmt: skip

    def __str__(self) -> str:
        return f"pp {self.pp} dp {self.dp}, batch {self.batch}, stage {self.stage}"


RANKS: dict[tuple[int, ...], tuple[tuple[float, float], ...]] = {  # `Stage`: by rank, behind a step and at the peak
    (32, 1, 1, 1, 0): ((1576.94, 6704.26), (1574.94, 6704.26), (1577.44, 6708.26), (1574.44, 6708.24)),
    (64, 1, 4, 1, 0): ((642.73, 5636.60), (640.23, 5636.60), (638.23, 5634.60), (638.73, 5634.10)),
    (64, 1, 4, 1, 1): ((392.77, 4695.38), (387.77, 4691.38), (385.77, 4693.38), (390.77, 4693.38)),
    (64, 1, 4, 1, 2): ((411.85, 3099.26), (414.85, 3105.26), (415.85, 3105.26), (413.85, 3103.26)),
    (64, 1, 4, 1, 3): ((555.10, 1703.28), (556.10, 1703.28), (553.10, 1700.79), (554.10, 1700.79)),
    (64, 2, 2, 1, 0): (
        (950.04, 6326.91),
        (949.04, 6326.91),
        (948.54, 6325.41),
        (951.04, 6324.91),
        (950.54, 6328.91),
        (951.04, 6326.91),
        (949.04, 6326.91),
        (952.04, 6326.41),
    ),
    (64, 2, 2, 1, 1): (
        (899.40, 3311.27),
        (900.40, 3315.27),
        (900.90, 3314.77),
        (898.40, 3315.77),
        (905.40, 3315.77),
        (903.90, 3316.77),
        (901.40, 3314.27),
        (897.90, 3312.26),
    ),
    (128, 4, 1, 4, 0): (
        (1574.44, 21825.64),
        (1574.44, 21828.64),
        (1574.44, 21826.64),
        (1574.44, 21828.64),
        (1578.94, 21829.64),
        (1574.44, 21826.64),
        (1574.44, 21828.64),
        (1574.94, 21826.64),
        (1572.44, 21825.64),
        (1576.44, 21826.64),
        (1576.94, 21830.64),
        (1578.44, 21828.64),
        (1588.94, 21841.14),
        (1588.94, 21842.64),
        (1576.44, 21826.64),
        (1573.44, 21834.64),
    ),
}


@cache
def _estimated(plan: Plan, batch: int) -> Estimate:
    return estimate(OPT_350M, plan, Cluster.of("h100", plan.world_size), 2048, batch, KORTHIKANTI)


def pairs() -> Iterator[tuple[Stage, Pair, Pair]]:
    """Every rank: its stage, MiB behind a step and MiB at the peak."""
    for key, ranks in RANKS.items():
        one = Stage(*key)
        found = _estimated(one.plan, one.batch).places[one.stage, 0, 0]
        for number, (behind, peak) in enumerate(ranks):
            name = f"{one}, rank {number} of it"
            yield one, Pair(name, behind, found.behind_step / _MIB), Pair(name, peak, found.allocated / _MIB)
