"""The four runs by the course's own parts: equal to one process, and every part is called by at least one of them."""

import subprocess
import sys

import pytest

from dualpipe_course.own import finder, runs, trainings
from dualpipe_course.own.parts import PARTS
from dualpipe_course.wrong import Wrong

TEXTS = {part: finder.official(part) for part in PARTS}


@pytest.mark.parametrize("name", runs.RUNS)
def test_a_run_is_equal_to_one_process(name):
    assert runs.judge(name, TEXTS) <= trainings.TOLERANCE


@pytest.mark.parametrize("name", runs.RUNS)
def test_what_a_run_calls_is_what_it_says(name):
    assert runs.called(name, TEXTS) == set(runs.RUNS[name])


@pytest.mark.parametrize("order", ["GPipe", "1F1B", "ZB-H1"])
def test_the_trainer_runs_other_orders(order, monkeypatch):
    monkeypatch.setitem(trainings.CASES, "together", lambda num_steps: [trainings.together_case(order, 2)])
    assert runs.judge("together", TEXTS) <= trainings.TOLERANCE


WRONG = {
    "dense": ("zero1", "(second.sqrt() + self.eps)", "second.sqrt()"),
    "pipeline": ("later", "weight.grad = grad if", "weight.grad = 2 * grad if"),
    "experts": ("router", "weights / weights.sum(-1, keepdim=True)", "weights"),
    "together": ("train", "total = num_tokens(targets, [get_rank()])", "total = 2 * num_tokens(targets, [get_rank()])"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_part_is_noticed(name):
    part, right, wrong = WRONG[name]
    assert right in TEXTS[part]
    with pytest.raises(Wrong, match=r"one process|shape|live"):
        runs.judge(name, TEXTS | {part: TEXTS[part].replace(right, wrong)}, num_steps=1)


SCRIPT = """
import sys
import dualpipe_lab as lab
from dualpipe_course.own import finder, runs, trainings
from dualpipe_course.own.parts import PARTS
texts = {part: finder.official(part) for part in PARTS}
losses = lab.launch(runs._on_a_rank, 4, texts, trainings._together, ("DualPipe", 2))[0].losses
sys.stdout.write(" ".join(["losses", *map(str, losses)]) + "\\n")  # one write: the ranks share the terminal
"""


def test_it_runs_under_torchrun(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {line for line in done.stdout.splitlines() if line.startswith("losses")}
    assert len(found) == 1
    wanted = trainings._together_reference("DualPipe", 2).losses
    assert [float(loss) for loss in found.pop().split()[1:]] == pytest.approx(wanted, rel=0, abs=1e-10)
