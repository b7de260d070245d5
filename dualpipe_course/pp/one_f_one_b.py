"""Exercises of "1F1B": the part `rows_1f1b`, two pipelines side by side.

Chapter: book/pp/one-f-one-b.  Rows are judged by the validator, by what each rank holds and by their last tick; the
step by gradients of one process, by microbatches held and by model time.
"""

import re
from collections.abc import Sequence

from dualpipe_course.declared import Repair
from dualpipe_course.own.part import Alone, Part
from dualpipe_course.pp import programs
from dualpipe_course.pp.several_pipelines import check_step
from dualpipe_course.wrong import Wrong
from dualpipe_lab.pp import schedules

SIZES = ((1, 1), (2, 1), (2, 3), (3, 4), (4, 2), (4, 8), (3, 0), (6, 6), (8, 20))  # stages, microbatches
PIPELINES: tuple[tuple[list[list[int]], int], ...] = (
    ([[0, 1, 2]], 4),
    ([[0, 1], [2, 3]], 4),
    ([[0, 2], [1, 3]], 5),
    ([[0, 2], [1, 3]], 1),
)


def _look(p: int, m: int) -> str:
    """What is wrong with the rows of p stages and m microbatches, in words."""
    from mine.rows_1f1b import one_f_one_b_rows

    rows = one_f_one_b_rows(p, m)
    try:
        _check_rows(rows, p, m)
    except Wrong as wrong:
        return wrong.message
    return ""


def _check_rows(rows: object, p: int, m: int) -> None:
    if not isinstance(rows, list | tuple) or not all(isinstance(row, str) for row in rows):
        kinds = sorted({type(row).__name__ for row in rows}) if isinstance(rows, list | tuple) else []
        found = f"a {type(rows).__name__}{' of ' + ', '.join(kinds) if kinds else ''}"
        raise Wrong(f"expected a list with one text per stage, such as '0F0 0F1 0B0 0B1', got {found}")
    if len(rows) != p:
        raise Wrong(f"{len(rows)} rows for {p} stages; write one per stage")
    if m == 0:
        if full := [row for row in rows if row.strip()]:
            raise Wrong(f"without a microbatch a row is an empty text, got {full[0]!r}")
        return
    if empty := [stage for stage, row in enumerate(rows) if not row.strip()]:
        raise Wrong(f"the row of stage {empty[0]} is empty")
    for stage, row in enumerate(rows):
        if strange := [word for word in row.split() if not re.fullmatch(rf"{stage}[FB]\d+", word)]:
            raise Wrong(f"{strange[0]!r} is in row {stage}, which has words such as {stage}F0 and {stage}B0 alone")
    known = schedules.build("1f1b", p, m)
    for stage, row in enumerate(rows):
        _check_held(stage, row.split(), p, m)
    programs.parse(rows, p, m)
    programs.check_actions(rows, known, "as 1F1B has it")


def _check_held(stage: int, words: Sequence[str], p: int, m: int) -> None:
    held, most = set[str](), min(p - stage, m)
    for word in words:
        kind, microbatch = word.removeprefix(str(stage))[0], word.removeprefix(str(stage))[1:]
        held = held | {microbatch} if kind == "F" else held - {microbatch}
        if len(held) > most:
            raise Wrong(
                f"with {word} stage {stage} holds {len(held)} activations, 1F1B holds min(p - stage, m) = {most}: the "
                "warm-up is one forward for each stage behind this one"
            )


rows = Part(
    "one_f_one_b-5",
    "rows_1f1b",
    "1F1B's rows",
    "Write one_f_one_b_rows(p, m): the rows of p stages for m microbatches.",
    names=("one_f_one_b_rows",),
    trials=(Alone(_look, SIZES, "{} stage(s), {} microbatch(es)"),),
    right=f"{len(SIZES)} sizes, stage r holds at most min(p - r, m) activations",
    minutes=30,
    points=3,
    hints=(
        "A row has three phases. How long is the warm-up of stage r, and what does the batch do to it if m is small?",
        "warmup = min(p - 1 - stage, m). Then each further F is followed by a B: F of warmup + i, B of i. How many "
        "pairs are there, and which B are left?",
        'words = [f"F{i}" for i in range(warmup)], then for i in range(m - warmup): f"F{warmup + i}", f"B{i}", then '
        'f"B{i}" for i in range(m - warmup, m). Put the stage before each word, a space between words.',
    ),
)


side_by_side = Repair(
    "one_f_one_b-4",
    "Two pipelines side by side",
    "Repair a step that holds too many microbatches where several pipelines run at once.",
    cases=PIPELINES,
    judge=check_step,
    right="one and two pipelines: gradients of one process, 1F1B's memory and 1F1B's time",
    minutes=10,
    points=2,
    trail=True,
    hints=(
        "Print the length of `live` after each forward, with pipelines [0, 2] and [1, 3].",
        "How many stages lie below this rank? Not all ranks belong to its pipeline.",
        "The warm-up counts places of the pipeline, as the messages do already.",
    ),
)
