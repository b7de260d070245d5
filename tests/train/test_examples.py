"""Every example runs by `python` and by `torchrun`, and says the same."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def started(*arguments):
    command = [sys.executable, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT, env=environment)


def python(*arguments):
    done = started(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_pipeline_in_any_order_equals_one_process():
    script, sizes = "examples/pipeline.py", ("--microbatches", 4, "--schedule")
    ours = [(name, python(script, "--ranks", 2, *sizes, name)) for name in ("easy_dualpipe", "dualpipe", "zbv")]
    for name, said in [*ours, ("dualpipev", python(*TORCHRUN, script, *sizes, "dualpipev"))]:
        line = re.fullmatch(rf"{name}, 2 ranks: loss off by (\S+), gradients (\S+), outputs (\S+)\n", said)
        assert line, said
        assert max(map(float, line.groups())) < 1e-13


def test_an_own_model_goes_on_from_its_checkpoint_in_both_ways(tmp_path):
    script, torchrun = "examples/own_model.py", (*TORCHRUN[:-1], "4")
    folder = ("--folder", tmp_path / "saved")
    said = [python(script, "--steps", 2, *folder), python(*torchrun, script, "--steps", 3, *folder)]
    said.append(python(script, "--steps", 1, "--schedule", "1f1b"))
    assert [re.findall(r"^step (\d)  loss [2-6]\.\d+ ", text, re.MULTILINE) for text in said] == [
        ["0", "1"],
        ["2"],
        ["0"],
    ]
    for text in said:
        assert float(re.search(r"those of one process, up to (\S+)\n\Z", text)[1]) < 1e-12


def test_a_model_trains_in_both_ways_and_goes_on_under_another_plan(tmp_path):
    script = "examples/train.py"
    sizes = ("--precision", "float64", "--global-batch", 4, "--sequence-length", 16, "--sample", "A rank ")
    options = (*sizes, "--steps", 3, "--zero", 1, "--dp", 2)
    folder, csv = tmp_path / "saved", tmp_path / "rows.csv"
    said = [python(script, *options, "--folder", tmp_path / "first")]
    said.append(python(*TORCHRUN, script, *options, "--folder", folder, "--csv", csv))
    curves = [re.findall(r"^ +(\d) +(\d\.\d{4}) ", text, re.MULTILINE) for text in said]
    assert [step for step, _ in curves[0]] == ["1", "2", "3"]
    assert curves[0] == curves[1]
    texts = [text.partition("text: ")[2] for text in said]
    assert texts[0] == texts[1]
    assert len(texts[0].encode()) > 100
    assert len(csv.read_text().splitlines()) == 4
    further = python(script, *sizes, "--steps", 4, "--tp", 2, "--folder", folder, "--resume", "--csv", csv)
    assert re.findall(r"^ +(\d) +\d\.\d{4} ", further, re.MULTILINE) == ["4"]
    assert [line.split(",")[0] for line in csv.read_text().splitlines()] == ["step", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("train", ["--resume"], "give --folder"),
        ("train", ["--steps", "0"], "--steps counts from 1, got 0"),
        ("pipeline", ["--ranks", "3"], "ValueError: dualpipe needs an even number of ranks, got 3"),
        ("pipeline", ["--schedule", "pipedream"], "invalid choice: 'pipedream'"),
    ],
)
def test_wrong_arguments_are_refused_before_any_process(script, options, message):
    done = started(f"examples/{script}.py", *options)
    assert done.returncode
    assert message in done.stderr
    assert "RankError" not in done.stderr
