"""Thirty mixed submissions graded: the right table, nothing left behind, and how long it took.

Right, starters, wrong, and each misbehaviour: hang, flood, memory, endless fork, killed parent, deleted folders,
patched checks, forged verdicts, edited check cells, processes left running, lost cells, files that are no notebooks.

    python benchmarks/grading.py [--seconds 60]     the time limit of one exercise
"""

import argparse
import importlib.util
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from dualpipe_course.grading import Grader, Limits, report, submissions

ROOT = Path(__file__).parents[1]


def shop(folder: Path) -> Any:
    """The submissions, from the tests."""
    spec = importlib.util.spec_from_file_location("mixed", ROOT / "tests" / "grading" / "mixed.py")
    assert spec
    assert spec.loader
    mixed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mixed)
    return mixed.make(folder)


def strays(before: set[int], scratch: Path) -> list[str]:
    """Processes that are new and descend from this run: they carry its scratch folder in their environment."""
    found = []
    for process in psutil.process_iter():
        if process.pid not in before and process.pid != os.getpid():
            try:
                if str(scratch) in process.environ().get("TMPDIR", ""):
                    found.append(f"{process.pid} {process.name()}")
            except psutil.Error:
                continue
    return found


def main() -> int:
    """Grade, compare with what must come out, look for leftovers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=Limits.seconds)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name) / "submissions", Path(name) / "grades"
        expected = shop(folder).expected
        found = submissions.find(folder, submissions.exercises(ROOT / "exercises"), out)
        before = set(psutil.pids())
        files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        started = time.monotonic()
        with Grader(out, Limits(seconds=seconds)) as grader:
            results = grader.grade(found, report=lambda graded: print(graded.learner, graded.points, graded.seconds))
            scratch = grader._scratch
        took = time.monotonic() - started
        Console().print(report.screen(results))
        wrong = [
            f"{graded.learner} {mark.name}: {mark.status}, not {expected[graded.learner][mark.name]}: {mark.message}"
            for graded in results
            for mark in graded.marks
            if mark.status != expected[graded.learner][mark.name]
        ]
        wrong += [f"left running: {stray}" for stray in strays(before, scratch)]
        wrong += ["the scratch folder is still there"] * scratch.exists()
        wrong += ["submissions changed"] * (files != {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()})
    print("\n".join(wrong) or "the table is right, no process and no file is left")
    print(f"{len(results)} submissions in {took:.0f} s, two at a time, load {os.getloadavg()[0]:.1f}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
