"""Every plan of up to 8 ranks beside transformers: logits, loss and raw gradients, within 1e-10 in float64.

Tiny models of each family are written by transformers and read by the ranks of every tp x cp x ep x pp that divides,
with 1 to 8 ranks.  Where pp is above 1 the synchronous schedules take turns, so that each family has each of them.
Layout, sequence parallelism, recomputation, overlapped experts and a loss in chunks are drawn for each plan.
Data ranks, ZeRO and experts within the data ranks are those of `plans.py`, beside one process.
Results are lines of JSON; a rerun goes on where the last one stopped.  Without --all a few plans are drawn.

    python benchmarks/pretrained_plans.py [--all] [--count 12] [--file _build/pretrained_plans.jsonl] [--batch 8]
"""

import argparse
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import _pretrained_proof as _proof
from _pretrained_proof import LIMITS, RANKS, Case
from _resumable import Rows, read, run
from rich.console import Console
from rich.table import Table

AXES = ("tp", "cp", "ep", "pp")
FLAGS = ("sequence_parallel", "recompute", "overlap", "loss_chunk")


def launches(waiting: Iterable[Case], size: int) -> Iterator[list[Case]]:
    """Cases of one number of ranks and of the fewest models, at most so many; the fewest ranks first."""
    by_ranks: dict[int, list[Case]] = defaultdict(list)
    for case in sorted(waiting, key=lambda case: (case.plan.world_size, case.key)):
        by_ranks[case.plan.world_size].append(case)
    for some in by_ranks.values():
        yield from (some[first : first + size] for first in range(0, len(some), size))


def marks(case: Case) -> Iterable[str]:
    """The rows of the table that a plan counts in."""
    yield f"1 {case.family}"
    yield f"2 {case.plan.world_size} rank{'s' if case.plan.world_size > 1 else ''}"
    yield from (f"3 {axis} > 1" for axis in AXES if getattr(case.plan, axis) > 1)
    yield from (f"4 {flag}" for flag in FLAGS if getattr(case.plan, flag))
    if case.plan.pp > 1:
        yield f"5 {case.plan.schedule}"


def table(every: Sequence[Case], rows: Rows) -> Table:
    """How many plans of how many are done, and the worst errors, by family, ranks, axis, setting and schedule."""
    done, total = defaultdict(list), defaultdict(int)
    for case in every:
        for mark in ("0 all", *marks(case)):
            total[mark] += 1
            if str(case) in rows:
                done[mark].append(rows[str(case)])
    shown = Table(title="Plans beside transformers, float64")
    for column in ("plans with", "done", "of", *LIMITS, "failed"):
        shown.add_column(column, justify="right")
    for mark, number in sorted(total.items()):
        fine = [row for row in done[mark] if "error" not in row]
        worst = [f"{max((row[name] for row in fine), default=0):.1e}" if fine else "" for name in LIMITS]
        failed = sum("error" in row or bool(_proof.problems(row)) for row in done[mark])
        shown.add_row(mark[2:], str(len(done[mark])), str(number), *worst, str(failed))
    return shown


def main() -> None:
    """Run what is not done yet, print the table, and exit with 1 where a plan failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every plan, not only a few that are drawn")
    for name, default in (("count", 12), ("batch", 8), ("ranks", RANKS)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--file", type=Path, default=Path("_build/pretrained_plans.jsonl"))
    arguments = parser.parse_args()
    every, file = list(_proof.cases(arguments.ranks)), arguments.file
    drawn = random.Random(0).sample(every, min(arguments.count, len(every)))
    chosen = every if arguments.all else drawn
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = read(file)
    waiting = [case for case in chosen if str(case) not in rows]
    print(f"{len(every)} plans of 1 to {arguments.ranks} ranks; {len(chosen) - len(waiting)} of {len(chosen)} are done")
    with TemporaryDirectory() as folder:
        right = _proof.references(Path(folder))
        for some in launches(waiting, arguments.batch):
            run(some, some[0].plan.world_size, file, _proof.prove_all, right)
            rows = read(file)
            print(f"{sum(str(case) in rows for case in chosen)} of {len(chosen)} done", flush=True)
    Console(width=140).print(table(every, rows))
    wrong = {str(case): row for case in every if (row := rows.get(str(case))) and ("error" in row or problems_of(row))}
    for case, row in wrong.items():
        print(f"{case}: {row.get('error') or problems_of(row)}")
    raise SystemExit(bool(wrong))


def problems_of(row: dict[str, object]) -> str:
    """What is beyond the limits, in one line."""
    return "; ".join(_proof.problems(row))


if __name__ == "__main__":
    main()
