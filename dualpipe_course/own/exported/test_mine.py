"""The checks of the parts as far as they need torch alone: rows as texts, and the four runs beside one process."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROWS = json.loads((HERE / "rows.json").read_text())


@pytest.mark.parametrize("function", ROWS)
def test_rows(function):
    part, name = function.split(".")
    build = getattr(import_module(f"mine.{part}"), name)
    for sizes, rows in ROWS[function].items():
        assert build(*map(int, sizes.split(","))) == rows, sizes


@pytest.mark.parametrize("name", ["dense", "pipeline", "experts", "together"])
def test_a_run_is_equal_to_one_process(name):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "run.py", name, "3"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("is equal to one process") == 4
