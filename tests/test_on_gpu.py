"""The script for a machine with one GPU: its tables on the stand-in, a part that fails, and a machine without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import stand_in
from scripts import load

ROOT = Path(__file__).parents[1]


def test_each_part_writes_its_table_on_the_stand_in_and_one_that_takes_too_long_is_named(
    on_stand_in, monkeypatch, tmp_path, capfd
):
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    for name, value in {"OUT": str(tmp_path), "PYTHONPATH": path}.items():
        monkeypatch.setenv(name, value)
    on_gpu = load(ROOT / "tools" / "on_gpu.py")
    rows = {"cells": 2, "compare": 1, "products": 2, "profile": 12}
    on_gpu.LIMITS["slow"] = 0.1
    assert on_gpu.main(["slow", *rows]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert lines == ["slow FAILED: not done after 0.1 s", *(f"{name}: {tmp_path}/{name}.md" for name in rows)]
    tables = {name: (tmp_path / f"{name}.md").read_text() for name in rows}
    for name, table in tables.items():
        assert table.startswith(f"{name}: stand-in for NCCL, no GPU, driver -, torch ")
        assert table.count("\n| ") == 1 + rows[name], table
    assert "| start/ranks-and-messages | 1 rank on NCCL agree with GLOO" in tables["cells"]
    assert "| pp/gpipe | skipped: rank 0 of 1 raised ValueError: GPipe is written for 4 ranks" in tables["cells"]
    assert "assumes 0.35 to 0.5 of the peak" in tables["products"]
    assert "| `aten::mm` |" in tables["profile"]
    assert "A step (119104 parameters, 1 x 16 tokens)" in tables["profile"]


def test_without_a_gpu_one_sentence_says_so(tmp_path):
    env = {name: value for name, value in os.environ.items() if name not in (stand_in.ACCELERATOR, stand_in.SUITE)}
    env |= {"OUT": str(tmp_path / "none"), "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([ROOT / "tools" / "on_gpu.sh"], env=env, stdout=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stdout.count("\n")) == (2, 1)
    assert done.stdout.startswith("there is no GPU to measure: NCCL needs")
    assert not (tmp_path / "none").exists()
