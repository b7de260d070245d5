"""Every benchmark runs at its smallest size: the quick ones always, the others with --every, as each night."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
CHROMIUM = Path("/usr/bin/chromium")
ONE = "--rounds 1 --steps 1"
QUICK = {
    "dp": f"{ONE} --width 16 --layers 2",
    "launch": "--rounds 1 --ranks 2",
    "pages": "--rounds 1 --rows 1",
}
SLOW = {
    "contests": "",
    "cp": "--rounds 1 --length 16 --ring-length 32",
    "ep": ONE,
    "grading": "--seconds 30",
    "kills": "--random 0",
    "microscope": "",
    "overlap": "--layers 1 --work-ms 1 --rounds 1 --unit-ms 1 --pipelines 2",
    "plans": "--count 1 --ranks 2 --file {scratch}/plans.jsonl",
    "pp": "--ranks 2 --rounds 1 --unit-ms 1 --only 1f1b --skip-real",
    "pp_split": "--rounds 1",
    "pretrained_plans": "--count 1 --ranks 2 --file {scratch}/pretrained_plans.jsonl",
    "resumes": "--model llama",
    "simulate": "--quick",
    "tp": f"{ONE} --hidden 16 --layers 1 --tokens 8 --vocabulary 64 --only step",
    "viz": "",
    "weights": "--layers 1 --hidden 64 --vocabulary 256 --experts 4",
    "whole": f"{ONE} --hidden 32 --layers 2 --tokens 8 --memory-rounds 1",
    "wire": "",
} | {f"reduced/{file.stem}": "" for file in sorted((FOLDER / "reduced").glob("*.py"))}


def test_every_benchmark_has_a_smallest_size():
    files = {str(file.relative_to(FOLDER).with_suffix("")) for file in FOLDER.rglob("[a-z]*.py")}
    assert files == {*QUICK, *SLOW}


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.every) for name in SLOW)])
def test_a_benchmark_runs_at_its_smallest_size(name, tmp_path):
    if name == "viz" and not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}")
    arguments = (QUICK | SLOW)[name].format(scratch=tmp_path).split()
    path = os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), "it prints a table"
