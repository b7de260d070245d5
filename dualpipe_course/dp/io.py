"""Exercises of "IO: save and load": who reads what, a disk that forgets, a run that must not notice.

Chapter: book/dp/io.  Reads are counted, a power failure is tried before every operation and with every loss that it may
cause, and a resumed run is compared with the uninterrupted one bit by bit.
"""

from collections.abc import Callable
from typing import Any

from dualpipe_course import check as checks
from dualpipe_course.dp import resuming, saving
from dualpipe_course.exercise import exercise, hint_of
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import check_ints, needs_function

NAMES = ("bytes in the last file", "files for rank 1", "bytes from file 1", "ranges in all")
EXPECTED = (12, 2, 24, 6)


def hint(exercise: int | None = None) -> None:
    """Print the next hint for an exercise, or for the first unsolved one."""
    hint_of(checks.topic("io"), exercise)


@exercise(
    "io-1",
    "Who reads what",
    "predict",
    minutes=8,
    points=1,
    hints=(
        "Shards have ceil(10 / 4) = 3 elements, until there are none left. Which elements are in file 3?",
        "On 3 ranks the shards have 4 elements. Draw both cuts above each other on one line.",
        "For each weight there are two moments: three numbers of 4 bytes.",
    ),
)
def who_reads(answer: object) -> str:
    """Predict sizes and reads for 10 weights with their moments, from 4 ranks to 3."""
    check_ints(
        answer,
        NAMES,
        EXPECTED,
        (
            {
                36: "the first three files have 3 elements each, so the last one has what is left",
                30: "elements are not cut; the first three files have 3 elements each",
                4: "one element is a weight and its two moments",
                24: "ceil(10 / 4) = 3, so the first three files hold 9 elements",
            },
            {
                3: "rank 1 of 3 holds elements 4 to 7; in which files of 3 elements are they?",
                1: "rank 1 of 3 holds elements 4 to 7; file 1 has 3 to 5 only",
            },
            {
                36: "element 3 is in file 1 too, but it goes to rank 0",
                8: "each element comes with two moments",
                48: "that is all that rank 1 reads, from both files",
                12: "elements 4 and 5 are in file 1",
            },
            {
                4: "two of the files are read by two ranks",
                7: "count the borders: 3 inside the old cut, 2 inside the new one, and none of them coincide",
                3: "a rank may need more than one file",
                18: "that counts the weights and both moments; count ranges of elements",
            },
        ),
        (
            "count the elements that are left for file 3",
            "rank 1 of 3 holds elements 4 to 7",
            "which elements of file 1 does rank 1 need?",
            "5 borders cut 10 elements into 6 ranges; a coinciding border would count once",
        ),
    )
    return "12 bytes in the last file, 24 from file 1, 6 ranges"


@exercise(
    "io-2",
    "Only what is needed",
    "implement",
    minutes=20,
    points=3,
    hints=(
        "Draw a matrix of 4 x 6, cut it by rows for two files and by columns for three ranks. Where in file 1 do the "
        "numbers of rank 1 lie?",
        "Row i of the matrix is row i - f * size of file f, and there it begins at that number times `columns`. A "
        "rank's part of a row lies together.",
        "Two parts of neighbouring rows touch in a file only if a rank has all columns: then a file is one read. A "
        "rank without columns reads nothing and returns rows x 0.",
    ),
)
def load_shard(fn: Callable[..., Any]) -> str:
    """Write `load_shard(read, rows, columns, num_files, num_ranks, rank)`: this rank's columns, each number once."""
    needs_function(fn)
    saving.check_reads(
        Without(fn, "dualpipe_lab.dp.layout:reshard", "dualpipe_lab.dp.checkpoint.region:copies_between")
    )
    return f"{len(saving.SIZES)} sizes with every rank, some without columns: nothing is read twice, nor in vain"


@exercise(
    "io-3",
    "A disk that forgets",
    "implement",
    minutes=35,
    points=4,
    hints=(
        "Write into a folder of another name, such as run/.saving-step-2. What if an earlier save left one there?",
        "Before the rename: sync each file for its bytes, and the folder for the names of its files.",
        "After the rename: sync run, which holds the name of the folder.",
    ),
)
def save(fn: Callable[..., Any]) -> str:
    """Write `save(disk, name, parts)`: whole or not at all, whenever the power fails."""
    needs_function(fn)
    saving.check_save(fn)
    return "whole or not at all, with the power failing before each operation and after the last"


@exercise(
    "io-4",
    "Resumed, not continued",
    "find the bug",
    minutes=12,
    points=2,
    hints=(
        "What does Adam need besides weights and moments? Look at the attributes of the optimizer.",
        "Which rank's random numbers does rank 1 get?",
        "adam.num_steps is the step of the bias correction; saved['random'] has one state per rank.",
    ),
)
def resume(fn: Callable[..., Any]) -> str:
    """Repair `resume(saved, adam, rank)` so that a run does not notice that it was interrupted."""
    needs_function(fn)
    resuming.check_resume(fn)
    return "two ranks with dropout go on bit by bit as the uninterrupted run"
