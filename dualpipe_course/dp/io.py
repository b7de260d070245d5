"""Exercises of "IO: save and load": who reads what, a disk that forgets, a run that must not notice.

Chapter: book/dp/io.  Reads are counted, a power failure is tried before every operation and with every loss that it may
cause, and a resumed run is compared with the uninterrupted one bit by bit.
"""

from collections.abc import Callable
from typing import Any

from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.dp import resuming, saving
from dualpipe_course.switched_off import Without

NAMES = ("bytes in the last file", "files for rank 1", "bytes from file 1", "ranges in all")


def _judge_load_shard(fn: Callable[..., Any]) -> str:
    saving.check_reads(
        Without(fn, "dualpipe_lab.dp.layout:reshard", "dualpipe_lab.dp.checkpoint.region:copies_between")
    )
    return f"{len(saving.SIZES)} sizes with every rank, some without columns: nothing is read twice, nor in vain"


def _judge_save(fn: Callable[..., Any]) -> str:
    saving.check_save(fn)
    return "whole or not at all, with the power failing before each operation and after the last"


def _judge_resume(fn: Callable[..., Any]) -> str:
    resuming.check_resume(fn)
    return "two ranks with dropout go on bit by bit as the uninterrupted run"


who_reads = Predict(
    "io-1",
    "Who reads what",
    NAMES,
    lambda: (12, 2, 24, 6),
    minutes=8,
    points=1,
    hints=(
        "Shards have ceil(10 / 4) = 3 elements, until there are none left. Which elements are in file 3?",
        "On 3 ranks the shards have 4 elements. Draw both cuts above each other on one line.",
        "For each weight there are two moments: three numbers of 4 bytes.",
    ),
    slips=(
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
)

load_shard = Implement(
    "io-2",
    "Only what is needed",
    "Write `load_shard(read, rows, columns, num_files, num_ranks, rank)`: this rank's columns, each number once.",
    judge=_judge_load_shard,
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

save = Implement(
    "io-3",
    "A disk that forgets",
    "Write `save(disk, name, parts)`: whole or not at all, whenever the power fails.",
    judge=_judge_save,
    minutes=35,
    points=4,
    hints=(
        "Write into a folder of another name, such as run/.saving-step-2. What if an earlier save left one there?",
        "Before the rename: sync each file for its bytes, and the folder for the names of its files.",
        "After the rename: sync run, which holds the name of the folder.",
    ),
)

resume = Repair(
    "io-4",
    "Resumed, not continued",
    "Repair `resume(saved, adam, rank)` so that a run does not notice that it was interrupted.",
    judge=_judge_resume,
    minutes=12,
    points=2,
    hints=(
        "What does Adam need besides weights and moments? Look at the attributes of the optimizer.",
        "Which rank's random numbers does rank 1 get?",
        "adam.num_steps is the step of the bias correction; saved['random'] has one state per rank.",
    ),
)
