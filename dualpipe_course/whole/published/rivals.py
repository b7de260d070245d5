"""What four other tools answer to published rows: the numbers they gave, and their errors.

Chapter: book/whole/predictions.  GiB of a rank's tensors at the peak, seconds of a step; None where a tool cannot be
told the row.  Answers of SimuMax at 4dcaae51 with its measured operators of the B200, Megatron-LM's
theoretical_memory_usage.py at d98e8a64, calculon at caa4b11f, and llm-analysis at d841e40a with the data sheet's peaks.
`benchmarks/planners.py` asks the tools again, and prints why an answer is lacking.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dualpipe_course.whole.published import Pair, korthikanti, megatron, simumax
from dualpipe_lab.plan import GptConfig

TABLES = ("B200 peaks", "Megatron peaks", "B200 steps", "Korthikanti steps")
_NO_CP: tuple[None, ...] = (None,) * 7
ANSWERS: dict[str, dict[str, tuple[float | None, ...]]] = {
    "SimuMax": {
        "B200 peaks": (
            66.438, 60.513, 38.942, 28.166, 86.883, 81.313, 52.681, 38.384, 68.162, 104.43, 111.8, 147.89, 86.554,
            139.13, 116.5,
        ),
        "Megatron peaks": (68.683, 68.683, 68.683, 56.534, 56.534, 56.534),
        "B200 steps": (
            0.82876, 1.4412, 5.1157, 0.69881, 1.3098, 4.9759, 0.39523, 0.74766, 2.8622, 0.25571, 0.49339, 1.9194,
            1.0727, 1.8708, 6.6593, 0.86073, 1.6004, 6.0387, 0.45292, 0.84687, 3.2106, 0.25583, 0.48681, 1.8726, 1.595,
            1.6272, 10.67, 10.516, 1.8143, 1.8962, 10.043,
        ),
    },
    "Megatron-LM": {
        "B200 peaks": (65.292, 61.114, 41.216, 31.268, 80.67, 78.1, 52.398, 39.547, *_NO_CP),
        "Megatron peaks": (60.948, 60.948, 60.948, 53.619, 53.619, 53.619),
    },
    "calculon": {"Korthikanti steps": (1.3956, 1.1367, 18.029, 13.638, 49.893, 34.473, 90.081, 66.041)},
    "llm-analysis": {
        "B200 peaks": (55.026, 49.03, 32.422, 24.118, 83.614, 68.808, 44.872, 32.905, *_NO_CP),
        "Megatron peaks": (59.758, 59.758, 59.758, 53.826, 53.826, 53.826),
        "B200 steps": (
            0.27786, 0.54849, 2.1723, 0.29961, 0.59261, 2.3506, 0.17492, 0.34542, 1.3685, 0.11257, 0.22183, 0.87739,
            0.35732, 0.70465, 2.7886, 0.3722, 0.73563, 2.9163, 0.20983, 0.41381, 1.6377, 0.12431, 0.24424, 0.96382,
            *_NO_CP,
        ),
        "Korthikanti steps": (0.84287, 1.0385, 11.269, 9.408, 32.568, 25.36, 61.151, 47.349),
    },
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A published figure; `gives` for the row of a factor, `is_used` where any estimate had a number from it."""

    published: float
    gives: bool = False
    is_used: bool = False


def rows(table: str) -> list[Row]:
    """The published rows of a table, in the order of the answers.

    Raises:
        ValueError: no table has this name.
    """
    if table == "B200 peaks":
        return [Row(row[3]) for kind in ("dense", "cp") for row in simumax.MEMORY[kind]]
    if table == "Megatron peaks":
        dense = {name for name, case in megatron.CASES.items() if isinstance(case.model, GptConfig)}
        return [Row(peak / megatron.GIB) for name, _, _, peak in megatron.ROWS if name in dense]
    if table == "B200 steps":
        given = [
            (measured / 1e3, simumax.CALIBRATION.get((index, count)))
            for index, row in enumerate(simumax.STEPS)
            for count, (measured, _) in row[6].items()
        ]
        return [Row(measured, number == "products", number is not None) for measured, number in given]
    if table == "Korthikanti steps":
        return [Row(row.published, not index, not index) for index, row in enumerate(korthikanti.STEP_ROWS)]
    raise ValueError(f"a table is one of {', '.join(TABLES)}, got {table!r}")


def ours(table: str) -> list[float]:
    """Our estimates of a table of steps, without a number of the machine."""
    if table == "B200 steps":
        return [simumax.plain_seconds(row, count) for row in simumax.STEPS for count in row[6]]
    return [korthikanti.seconds(row) for row in korthikanti.STEP_ROWS]


def pairs(table: str, answers: Sequence[float | None], one_factor: bool = False) -> list[Pair]:
    """Published figures beside answers, where there is one.

    Args:
        table: of the rows.
        answers: as many as rows.
        one_factor: multiply all answers by measured over answered of one row.
    """
    found = [(row, answer) for row, answer in zip(rows(table), answers, strict=True) if answer is not None]
    factor = next(row.published / answer for row, answer in found if row.gives) if one_factor else 1.0
    return [
        Pair(f"{table} {number}", row.published, answer * factor, row.is_used)
        for number, (row, answer) in enumerate(found)
    ]
