"""A tool's answers to rows, in a process of its own, and what the answers are worth.

In: rows, the folder of a tool's checkout, the script beside this file that asks it.  Out: answers, errors.
An answer is a number, or reasons why the tool cannot give one, with semicolons between.  The script gets the folder as
its argument and the rows' inputs as JSON, and prints one answer for each of them as JSON in its last line.
"""

import json
import os
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from _planner_rows import Row

Answers = dict[tuple[str, str], float | str]
NOT_RUN = "not run"


def key(row: Row) -> tuple[str, str]:
    return row.table, row.name


def ask(script: Path, folder: Path | None, python: str, rows: Sequence[Row]) -> Answers:
    """Return a tool's answers; NOT_RUN for every row without a folder.

    Raises:
        RuntimeError: the script failed, with the last lines that it wrote.
        ValueError: it answered another number of rows.
    """
    if folder is None:
        return {key(row): NOT_RUN for row in rows}
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, str(script), str(folder)], input=json.dumps([row.inputs for row in rows]), env=clean, text=True,
        capture_output=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{script.name} failed on {folder}:\n{done.stderr[-2000:]}")
    return read(done.stdout, rows)


def read(text: str, rows: Sequence[Row]) -> Answers:
    """Return the answers in the last line that a script printed.

    Raises:
        ValueError: there are not as many as rows.
    """
    found = json.loads(text.strip().splitlines()[-1])
    if len(found) != len(rows):
        raise ValueError(f"a script answers every row, got {len(found)} answers to {len(rows)} rows")
    return {key(row): one if isinstance(one, str) else float(one) for row, one in zip(rows, found, strict=True)}


def factors(rows: Sequence[Row], answers: Mapping[tuple[str, str], float | str]) -> dict[str, float]:
    """Return measured over estimated by machine, of the row that gives it."""
    found = {}
    for row in rows:
        if row.gives and not isinstance(answer := answers[key(row)], str):
            found[row.machine] = row.published / answer
    return found


@dataclass(frozen=True)
class Summary:
    """Errors of a tool in a table.

    Attributes:
        count, total: answers with an error, and rows that count.
        median, worst: without and with its sign.
        reasons: why others lack an answer; a row may have several.
    """

    count: int
    total: int
    median: float
    worst: float
    reasons: Counter[str]


def summary(
    rows: Sequence[Row], answers: Mapping[tuple[str, str], float | str], by_machine: Mapping[str, float] | None = None
) -> Summary:
    """Sum up a table; rows that gave a number to any of the estimates are left out for all of them.

    Args:
        rows: of the table.
        answers: of the tool.
        by_machine: factors of its answers, None for 1.
    """
    errors, reasons = [], Counter[str]()
    for row in rows:
        if row.is_used:
            continue
        answer = answers[key(row)]
        if isinstance(answer, str):
            reasons.update(answer.split("; "))
        elif by_machine is None:
            errors.append(answer / row.published - 1)
        elif row.machine in by_machine:
            errors.append(answer * by_machine[row.machine] / row.published - 1)
        else:
            reasons["no factor"] += 1
    total = sum(not row.is_used for row in rows)
    if not errors:
        return Summary(0, total, float("nan"), float("nan"), reasons)
    return Summary(len(errors), total, median(map(abs, errors)), max(errors, key=abs), reasons)
