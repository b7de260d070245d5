"""Many cases with a line of JSON for each: what is done is read again, and a case that fails is run alone."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dualpipe_lab as lab

Rows = dict[str, dict[str, Any]]  # by the case's line
Prove = Callable[..., list[dict[str, Any]]]  # in a rank, of cases, what is right, and the file


def read(file: Path) -> Rows:
    """The results so far; a line that a killed run left half-written does not count."""
    rows: Rows = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[row["case"]] = row
    return rows


def append(file: Path, case: object, result: dict[str, Any]) -> None:
    """Write the line of one case."""
    with file.open("a") as lines:
        lines.write(json.dumps({"case": str(case), **result}) + "\n")


def run(
    chosen: Sequence[Any], num_ranks: int, file: Path, prove: Prove, references: Callable[[Sequence[Any]], Any]
) -> None:
    """Prove some cases in one launch; where it fails, the case that failed alone, and then the others."""
    rest = list(chosen)
    alone = False
    while rest:
        some = rest[:1] if alone else rest
        try:
            sizes = num_ranks, some, references(some), str(file)
            lab.launch(prove, *sizes, timeout=120 + 60 * len(some), output="collect")
        except (lab.RankError, lab.RankTimeout, RuntimeError) as error:
            if alone:
                append(file, some[0], {"error": str(error)[:2000]})
        done = read(file)
        rest, alone = [case for case in rest if str(case) not in done], not alone
