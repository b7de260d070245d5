"""What four other tools answer to published rows: the numbers they gave, and their errors.

Chapter: book/whole/predictions.  GiB of a rank's tensors at the peak, seconds of a step; None where a tool cannot be
told the row.  Answers of SimuMax at 4dcaae51 with its measured operators of the B200, Megatron-LM's
theoretical_memory_usage.py at d98e8a64, calculon at caa4b11f, and llm-analysis at d841e40a with the data sheet's peaks.
`benchmarks/planners.py` asks the tools again, and prints why an answer is lacking.  Our own steps of Korthikanti's
models take 20 s to simulate, so they are stored too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dualpipe_course.whole.published import Pair, korthikanti, megatron, simumax
from dualpipe_lab.plan import GptConfig

TABLES = ("B200 peaks", "Megatron peaks", "B200 steps", "Korthikanti steps")
_NO_CP: tuple[None, ...] = (None,) * 7
ANSWERS: dict[str, dict[str, tuple[float | None, ...]]] = {
    "dualpipe-lab": {"Korthikanti steps": (1.21365, 0.918836, 14.877, 11.0704, 40.8952, 30.4016, 80.4893, 60.3826)},
    "SimuMax": {
        "B200 peaks": (
            66.4383, 60.5134, 38.9422, 28.1663, 86.8835, 81.3128, 52.6813, 38.3838, 68.1619, 104.433, 111.802, 147.886,
            86.554, 139.128, 116.501,
        ),
        "Megatron peaks": (68.6829, 68.6829, 68.6829, 56.5342, 56.5342, 56.5342),
        "B200 steps": (
            0.828765, 1.4412, 5.1157, 0.698813, 1.3098, 4.9759, 0.395233, 0.747656, 2.8622, 0.255711, 0.493385, 1.9194,
            1.0727, 1.8708, 6.6593, 0.860726, 1.6004, 6.0387, 0.452918, 0.846871, 3.2106, 0.255833, 0.486806, 1.8726,
            1.595, 1.6272, 10.6704, 10.5157, 1.8143, 1.8962, 10.0435,
        ),
    },
    "Megatron-LM": {
        "B200 peaks": (65.2919, 61.1143, 41.2162, 31.268, 80.6702, 78.1001, 52.3976, 39.5469, *_NO_CP),
        "Megatron peaks": (60.9481, 60.9481, 60.9481, 53.6188, 53.6188, 53.6188),
    },
    "calculon": {
        "Korthikanti steps": (1.3956, 1.13667, 18.0288, 13.6381, 49.8926, 34.4728, 90.0809, 66.0407),
    },
    "llm-analysis": {
        "B200 peaks": (55.0263, 49.0297, 32.4217, 24.1185, 83.6141, 68.8077, 44.8724, 32.9052, *_NO_CP),
        "Megatron peaks": (59.7583, 59.7583, 59.7583, 53.8262, 53.8262, 53.8262),
        "B200 steps": (
            0.277858, 0.548488, 2.17227, 0.299614, 0.592614, 2.35061, 0.174917, 0.345423, 1.36846, 0.112568, 0.221828,
            0.877391, 0.357317, 0.704648, 2.78863, 0.372195, 0.735632, 2.91625, 0.209826, 0.413812, 1.63773, 0.12431,
            0.244241, 0.963824, *_NO_CP,
        ),
        "Korthikanti steps": (0.842873, 1.03846, 11.2687, 9.40798, 32.5679, 25.3601, 61.1513, 47.3487),
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


def ours(table: str) -> tuple[float | None, ...]:
    """Our estimates of a table of steps, without a number of the machine."""
    if table == "B200 steps":
        return tuple(simumax.plain_seconds(row, count) for row in simumax.STEPS for count in row[6])
    return ANSWERS["dualpipe-lab"][table]


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
