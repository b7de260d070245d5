"""A checkpoint of one plan goes on under another with the same curve; whatever ends a run leaves whole checkpoints."""

import os
import random
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training_runs import LLAMA, OPTIONS, TEXT, V3, plan, run, worst

import dualpipe_lab as lab
from dualpipe_lab import models, tp, train
from dualpipe_lab.dp.checkpoint import latest, saved_steps, session
from dualpipe_lab.train.run import Job, train_rank

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def expected():
    return {config: train.reference(config, TEXT, 5, **OPTIONS) for config in (LLAMA, V3)}


# as Llama 3.1 stretches its angles, with norms of queries and keys and one table for both ends
STRETCHED = replace(LLAMA, rope_scaling=tp.RopeScaling(4, 1, 4, 8), qk_norm=True, tied=True)


def test_a_config_with_a_scaling_goes_through_checkpoints_and_is_published(tmp_path):
    reference, half = train.reference(STRETCHED, TEXT, 5, **OPTIONS), {"folder": tmp_path / "saved", "save_every": 3}
    run(STRETCHED, plan(dp=2, zero=3), steps=3, **half)
    result = run(STRETCHED, plan(tp=2, sequence_parallel=True), resume=tmp_path / "saved", weights=True)
    follows(result, reference, 3)
    model = train.read_model(tmp_path / "saved")
    assert model.config == STRETCHED
    models.save_pretrained(model, tmp_path / "published")
    again = models.PlainLlama(models.config_from_pretrained(tmp_path / "published"), torch.float64)
    models.load_pretrained(again, tmp_path / "published")
    assert again.config == replace(STRETCHED, head_size=STRETCHED.size_of_head)
    assert all(map(torch.equal, again.parameters(), model.parameters()))


EVALUATED = {"evaluation": TEXT, "evaluate_every": 5, "num_evaluations": 2}


@pytest.fixture(scope="module")
def averaged():
    """The loss of the averaged weights after a training that never ended, on one rank."""
    found = {config: run(config, plan(), ema=0.9, **EVALUATED).metrics[-1] for config in (LLAMA, V3)}
    assert all(abs(row.evaluation - row.loss) > 1e-3 for row in found.values())
    return {config: row.evaluation for config, row in found.items()}


def follows(result, expected, first):
    """The rows after step `first`, and the last weights, are those of a run that never ended."""
    assert [row.step for row in result.metrics] == list(range(first + 1, 6))
    rest = train.Result("", expected.metrics[first:], state=expected.weights())
    numbers, weights = worst(result, rest)
    assert numbers < 1e-10
    assert weights < 1e-8


RESUMES = [
    (LLAMA, plan(dp=2, zero=3), plan(pp=2, num_microbatches=4, schedule="dualpipe")),
    (LLAMA, plan(pp=2, tp=2, num_microbatches=2, zero=0), plan(cp=2, dp=2, zero=2, num_microbatches=2)),
    (LLAMA, plan(), plan(tp=2, sequence_parallel=True)),
    (V3, plan(ep=2, tp=2), plan(dp=2, ep=2, experts_in_data=True, zero=1)),
    (V3, plan(pp=2, ep=2, num_microbatches=4, schedule="dualpipev"), plan(ep=4, num_microbatches=1)),
]


@pytest.mark.parametrize(("config", "before", "after"), RESUMES, ids=str)
def test_another_plan_goes_on_with_the_same_curve(tmp_path, expected, averaged, config, before, after):
    schedule = OPTIONS["schedule"]
    first = run(config, before, steps=3, folder=tmp_path, ema=0.9, schedule=schedule)
    assert first.checkpoint == tmp_path / "step-00000003"
    second = run(config, after, resume=tmp_path, folder=tmp_path, ema=0.9, **EVALUATED)
    follows(second, expected[config], 3)
    assert second.metrics[-1].evaluation == pytest.approx(averaged[config], rel=1e-10)


SCRIPT = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import os, signal
from training_runs import LLAMA, plan, run
from dualpipe_lab.dp.checkpoint import session

def main(folder, how):
    print("starts", flush=True)
    result = run(LLAMA, plan(dp=2, zero=1), steps=5000, folder=folder, save_every=1, keep=2, log_every=1)
    print("ended", result.interrupted, result.metrics[-1].step, result.checkpoint, flush=True)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def started(tmp_path, *arguments):
    """A training in a process of its own, after its second step; its output."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "saved"), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=environment, **pipes)
    for line in process.stdout:
        if line.startswith("step 2 "):
            return process
    raise AssertionError(f"the training ended with {process.wait()} before its second step")


def test_an_interrupt_ends_the_step_saves_and_says_so(tmp_path):
    process = started(tmp_path, "interrupt")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "interrupted: the training stops after this step; interrupt again to stop at once" in output
    step = saved_steps(tmp_path / "saved")[-1]
    assert f"ended True {step} {tmp_path}/saved/step-{step:08d}" in output


NUM_STEPS = 60


def job(folder, chosen, resume):
    """A training that saves after every step, as `train.run` hands it to its ranks."""
    options = train.Options(**OPTIONS, folder=folder, save_every=1, keep=2, log_every=0)
    scratch = folder.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    return Job(LLAMA, chosen, TEXT, NUM_STEPS, options, resume, None, False, scratch)


def dies(rank, world_size, given, victim, delay):
    """Train; the victim is killed after `delay` seconds, or with None in the middle of writing its first file."""

    def die(*arguments):
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim and delay is None:
        session.folders.sync = die  # a save syncs files and names; rank 0's index is written by then, and not renamed
        session.write_tensors = die if rank else session.write_tensors
    elif rank == victim:
        threading.Timer(delay, die).start()
    train_rank(rank, world_size, given)


def test_kill_9_at_any_moment_and_the_resumed_run_ends_with_the_same_weights(tmp_path):
    """One rank is killed four times: in its file, before the rename, twice at random; each resume has another plan."""
    folder, draw = tmp_path / "saved", random.Random(0)
    expected = train.reference(LLAMA, TEXT, NUM_STEPS, **OPTIONS)
    plans = [plan(dp=2, zero=1), plan(pp=2, num_microbatches=2), plan(dp=2, zero=3), plan(tp=2)]
    run(LLAMA, plans[0], steps=1, folder=folder)
    ends = []
    for chosen, victim, delay in zip(
        plans, (1, 0, 0, 1), (None, None, draw.uniform(0, 1), draw.uniform(0, 1)), strict=True
    ):
        before = latest(folder)
        with pytest.raises(lab.RankError, match="SIGKILL"):
            lab.launch(dies, 2, job(folder, chosen, before), victim, delay, timeout=120)
        ends.append(saved_steps(folder)[-1])
    assert ends == sorted(ends)
    assert ends[1] == 1, "neither half a file nor a checkpoint without its name counts"
    last = run(LLAMA, plan(cp=2), steps=NUM_STEPS, resume=folder, weights=True)
    numbers, weights = worst(last, train.Result("", expected.metrics[ends[-1] :], state=expected.weights()))
    assert numbers < 1e-10
    assert weights < 1e-8
