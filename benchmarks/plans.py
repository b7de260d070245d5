"""Every plan of 8 ranks beside one process: raw gradients, loss, norm, weights, and the calls of a step.

A tiny Llama and a tiny V3 model train for five steps in float64 under every plan that they allow: all factorisations of
the ranks over pp, dp, cp, tp and ep (as an axis and within the data ranks), every synchronous schedule, ZeRO 0 to 3.
Results are lines of JSON; a rerun goes on where the last one stopped.  Without --all a few plans are drawn.

    python benchmarks/plans.py [--all] [--count 16] [--file _build/plans.jsonl] [--batch 16] [--ranks 8]
"""

import argparse
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import _proof
from _proof import LIMITS, Case
from _resumable import Rows, read, run
from rich.console import Console
from rich.table import Table

AXES = ("pp", "dp", "cp", "tp", "ep")


def marks(case: Case) -> Iterable[str]:
    """The rows of the table that a plan counts in."""
    yield case.model
    yield from (f"{axis} > 1" for axis in AXES if getattr(case.plan, axis) > 1)
    yield f"ZeRO-{case.plan.zero}"
    if case.plan.pp > 1:
        yield case.plan.schedule


def table(every: Sequence[Case], rows: Rows) -> Table:
    """How many plans of how many are done, and the worst errors, by model, axis, stage of ZeRO and schedule."""
    done: dict[str, list[dict[str, Any]]] = defaultdict(list)
    total: dict[str, int] = defaultdict(int)
    for case in every:
        for mark in ("all", *marks(case)):
            total[mark] += 1
            if str(case) in rows:
                done[mark].append(rows[str(case)])
    shown = Table(title="Plans beside one process, float64")
    for column in ("plans with", "done", "of", *LIMITS, "calls as predicted", "failed"):
        shown.add_column(column, justify="right")
    for mark, number in sorted(total.items(), key=lambda pair: (pair[0] != "all", pair[0].lower())):
        fine = [row for row in done[mark] if "error" not in row]
        worst = [f"{max((row[name] for row in fine), default=0):.1e}" for name in LIMITS]
        counted = [row["traffic"] for row in fine]
        failed = sum("error" in row or bool(_proof.problems(row)) for row in done[mark])
        shown.add_row(mark, str(len(done[mark])), str(number), *worst, f"{sum(counted)} of {len(counted)}", str(failed))
    return shown


def main() -> None:
    """Run what is not done yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every plan, not only a few that are drawn")
    for name, default in (("count", 16), ("batch", 16), ("ranks", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--file", type=Path, default=Path("_build/plans.jsonl"))
    arguments = parser.parse_args()
    every, file = list(_proof.cases(arguments.ranks)), arguments.file
    random.Random(0).shuffle(every)  # so that the first plans are of all kinds
    chosen = every if arguments.all else every[: arguments.count]
    file.parent.mkdir(parents=True, exist_ok=True)
    waiting = [case for case in chosen if str(case) not in read(file)]
    print(f"{len(every)} plans of {arguments.ranks} ranks; {len(chosen) - len(waiting)} of {len(chosen)} are done")
    for first in range(0, len(waiting), arguments.batch):
        some = waiting[first : first + arguments.batch]
        run(some, arguments.ranks, file, _proof.prove_all, _proof.references)
        rows = read(file)
        bad = sum("error" in row or bool(_proof.problems(row)) for row in rows.values())
        print(f"{sum(str(case) in rows for case in chosen)} of {len(chosen)} done, {bad} failed", flush=True)
    rows = read(file)
    Console(width=180).print(table(every, rows))
    for case in every:
        row = rows.get(str(case), {"error": ""})
        if row.get("error") or ("error" not in row and _proof.problems(row)):
            print(f"{case}: {row.get('error') or '; '.join(_proof.problems(row))}")


if __name__ == "__main__":
    main()
