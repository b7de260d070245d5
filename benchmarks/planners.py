"""Our estimates of memory and time beside those of other tools, on the same published rows.

    python benchmarks/planners.py [--rows] [--python PYTHON]
        [--simumax PATH] [--megatron PATH] [--calculon PATH] [--llm-analysis PATH]

A path is a checkout of the tool, which is asked in a process of its own under PYTHON (default: this one); without it
the tool's rows are `not run`.  They need numpy, pandas, sympy, tabulate, matplotlib, graphviz, tqdm (SimuMax) and fire
(llm-analysis), no torch and no GPU.
How an answer was come by:
  as it comes  from the data sheet or the tool's own file of the machine
  one factor   times measured over estimated of one row of that machine, the same row for every tool
  three rows   of ours: how much of the peaks products, NVLink and attention reach, each from one row
  published    what SimuMax prints for the row, with operators that were measured on that machine
Rows that gave a factor or a number are left out for every tool.  Peaks are in GiB of tensors.  What a tool ignores (a
dropout mask, a bias) is an error of its answer; a row whose model or plan it cannot be told is listed with the reason.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from _planner_answers import NOT_RUN, Answers, Summary, ask, factors, key, summary
from _planner_rows import TABLES, Row, all_rows
from rich.console import Console
from rich.table import Table

from dualpipe_course.whole.published import rivals

TOOLS = {
    "SimuMax": "_ask_simumax.py",
    "Megatron-LM": "_ask_megatron.py",
    "calculon": "_ask_calculon.py",
    "llm-analysis": "_ask_llm_analysis.py",
}
OPTIONS = {"SimuMax": "simumax", "Megatron-LM": "megatron", "calculon": "calculon", "llm-analysis": "llm_analysis"}
Lines = list[tuple[str, str, Answers]]


def commit(folder: Path) -> str:
    """The commit of a checkout."""
    found = subprocess.run(["git", "-C", str(folder), "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "of unknown commit"


def our_lines(rows: Sequence[Row]) -> Lines:
    """Our estimates, and those that SimuMax has published."""
    fitted = {key(row): row.fitted() if row.fitted else "no numbers of this machine" for row in rows}
    theirs = {key(row): "no published estimate" if row.theirs is None else row.theirs for row in rows}
    return [
        ("dualpipe-lab", "as it comes", {key(row): row.ours() for row in rows}),
        ("dualpipe-lab", "three rows", fitted),
        ("SimuMax", "published", theirs),
    ]


def summaries(rows: Sequence[Row], lines: Lines) -> Iterator[tuple[str, str, str, Summary]]:
    """Yield table, tool, how, and errors; a factor only where rows have a machine."""
    for name in TABLES:
        some = [row for row in rows if row.table == name]
        for tool, how, answers in lines:
            if how in ("three rows", "published") and all(isinstance(answers[key(row)], str) for row in some):
                continue
            yield name, tool, how, summary(some, answers)
            if how == "as it comes" and (found := factors(some, answers)):
                yield name, tool, "one factor", summary(some, answers, found)


def table(found: Sequence[tuple[str, str, str, Summary]]) -> Table:
    shown = Table(title="Errors of estimates of published rows")
    for column in ("rows", "tool", "how", "answered", "median", "worst", "not answered"):
        shown.add_column(column, justify="left" if column in ("rows", "tool", "how", "not answered") else "right")
    for name, tool, how, one in found:
        errors = (f"{one.median:.2%}", f"{one.worst:+.2%}") if one.count else ("-", "-")
        why = "; ".join(f"{count} {reason}" for reason, count in one.reasons.items())
        shown.add_row(name, tool, how, f"{one.count} of {one.total}", *errors, why)
    return shown


def agreement(rows: Sequence[Row], answers: Answers) -> str:
    """How far SimuMax's answers lie from what it has published for the same rows."""
    found = [
        abs(answer / row.theirs - 1) for row in rows if row.theirs and not isinstance(answer := answers[key(row)], str)
    ]
    return f"SimuMax's {len(found)} answers lie within {max(found):.2%} of its published ones" if found else ""


def beside_stored(tool: str, rows: Sequence[Row], answers: Answers) -> str:
    """How many answers are those that `dualpipe_course.whole.published.rivals` stores, and which are not."""
    same, others = 0, []
    for table, stored in rivals.ANSWERS[tool].items():
        some = [row for row in rows if row.table == table]
        for row, kept in zip(some, stored, strict=bool(some)):
            answer = answers[key(row)]
            if isinstance(answer, str) or kept is None:
                is_same = isinstance(answer, str) and kept is None
            else:
                is_same = f"{answer:.6}" == f"{kept:.6}"
            same += is_same
            if not is_same:
                others.append(f"{row.table}: {row.name}: {answer}, stored {kept}")
    return "\n    ".join([f"{same} answers are the stored ones, {len(others)} are not", *others])


def print_rows(rows: Sequence[Row], lines: Lines) -> None:
    """Print every row: what was published, and each answer with its error."""
    for row in rows:
        print(f"\n{row.table}: {row.name}: {row.published:.4g}{' (left out)' * row.is_used}")
        for tool, how, answers in lines:
            answer = answers[key(row)]
            text = answer if isinstance(answer, str) else f"{answer:.4g} {answer / row.published - 1:+.2%}"
            print(f"    {tool}, {how}: {text}")


def main() -> None:
    """Ask every tool, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in OPTIONS.values():
        parser.add_argument(f"--{option.replace('_', '-')}", type=Path, help="a checkout of this tool")
    parser.add_argument("--python", default=sys.executable, help="that has what the tools need")
    parser.add_argument("--rows", action="store_true", help="print every row")
    arguments = parser.parse_args()
    rows, lines = all_rows(), Lines()
    lines += our_lines(rows)
    print(f"dualpipe-lab: {beside_stored('dualpipe-lab', rows, lines[0][2])}")
    for tool, script in TOOLS.items():
        folder = getattr(arguments, OPTIONS[tool])
        answers = ask(Path(__file__).parent / script, folder, arguments.python, rows)
        lines.append((tool, "as it comes", answers))
        print(f"{tool}: {NOT_RUN if folder is None else commit(folder)}")
        if folder is not None:
            print(beside_stored(tool, rows, answers))
        if tool == "SimuMax" and folder is not None:
            print(agreement(rows, answers))
    if arguments.rows:
        print_rows(rows, lines)
    Console(width=200).print(table(list(summaries(rows, lines))))


if __name__ == "__main__":
    main()
