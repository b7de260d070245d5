"""Exercises of "DualPipeV": its rows.

Chapter: book/pp/dualpipev.  Rows are compared with the library's, which are DeepSeek's and torch's action by action.
"""

from dualpipe_course.own.part import Alone, Part
from dualpipe_course.pp import programs
from dualpipe_course.pp.dualpipe import COST
from dualpipe_lab.pp.schedules.dualpipe import dualpipev

SIZES = ((1, 2), (1, 3), (2, 4), (2, 5), (3, 7), (4, 10), (5, 10))


def _look(p: int, m: int) -> str:
    from mine.rows_dualpipev import dualpipev_place, dualpipev_rows

    expected = dualpipev(p, m)
    return programs.look_at_rows(dualpipev_rows(p, m), expected, COST, lambda rank, _: _stages(rank, p)) or (
        programs.look_at_place(dualpipev_place(p), expected, "dualpipev_place(p)")
    )


def _stages(rank: int, p: int) -> str:
    return f" (stages {rank} and {2 * p - 1 - rank} are here, both from microbatch 0 on)"


rows = Part(
    "dualpipev-1",
    "rows_dualpipev",
    "DualPipeV's rows",
    "Write dualpipev_rows and dualpipev_place from the words of DualPipe.",
    names=("dualpipev_rows", "dualpipev_place"),
    trials=(Alone(_look, SIZES, "{} position(s), {} microbatches"),),
    right="7 sizes action by action, odd numbers of positions and of microbatches among them",
    minutes=20,
    points=3,
    hints=(
        "Position r of p does what position r of 2 p does under DualPipe. How many microbatches has that DualPipe?",
        "DualPipe gives half of its microbatches to each flow. Here all m pass in both flows, first down, then up.",
        "named(words(r, 2 * p, 2 * m), ((r, 0), (2 * p - 1 - r, 0))) for every r; the place is the smaller one of "
        "stage and 2 p - 1 - stage.",
    ),
)
