"""A checkpoint of one plan goes on under another with the same curve; whatever ends a run leaves whole checkpoints."""

import os
import random
import signal
import threading
from dataclasses import replace
from functools import cache

import pytest
from training_runs import LLAMA, OPTIONS, QWEN3_MOE, TEXT, V3, plan, run, worst

import dualpipe_lab as lab
from dualpipe_lab import tp, train
from dualpipe_lab.dp.checkpoint import latest, saved_steps, session
from dualpipe_lab.train.run import TrainJob, train_rank

# as Llama 3.1 stretches its angles, with norms of queries and keys and one table for both ends
STRETCHED = replace(LLAMA, rope_scaling=tp.RopeScaling(4, 1, 4, 8), qk_norm=True, tied=True)


@cache
def expected(config, steps=5):
    return train.reference(config, TEXT, steps, **OPTIONS)


EVALUATED = {"evaluation": TEXT, "evaluate_every": 4}


@cache
def averaged(config):
    """The loss of the averaged weights after step 4 of a training that never ended, on one rank."""
    row = run(config, plan(), steps=4, ema=0.9, **EVALUATED).metrics[-1]
    assert abs(row.evaluation - row.loss) > 1e-3
    return row.evaluation


def follows(result, config, first, steps=5):
    """The rows after step `first`, and the last weights, are those of a run that never ended."""
    right = expected(config, steps)
    numbers, weights = worst(result, train.Result("", right.metrics[first:], state=right.weights()))
    assert numbers < 1e-10
    assert weights < 1e-8


RESUMES = [
    (LLAMA, plan(dp=2, zero=3), plan(pp=2, num_microbatches=4, schedule="dualpipe")),
    (LLAMA, plan(pp=2, tp=2, num_microbatches=2, zero=0), plan(cp=2, dp=2, zero=3, num_microbatches=2)),
    (LLAMA, plan(), plan(tp=2, sequence_parallel=True)),
    (V3, plan(ep=2, tp=2), plan(dp=2, ep=2, experts_in_data=True, zero=1)),
    (V3, plan(pp=2, ep=2, num_microbatches=4, schedule="dualpipev"), plan(ep=4, num_microbatches=1)),
    (STRETCHED, plan(dp=2, zero=3), plan(tp=2, sequence_parallel=True)),
    (QWEN3_MOE, plan(dp=2, zero=3), plan(ep=2)),
]


@pytest.mark.parametrize(("config", "before", "after"), RESUMES, ids=str)
def test_another_plan_goes_on_with_the_same_curve(tmp_path, config, before, after):
    first = run(config, before, steps=3, folder=tmp_path, ema=0.9)
    assert first.checkpoint == tmp_path / "step-00000003"
    second = run(config, after, resume=tmp_path, folder=tmp_path, ema=0.9, **EVALUATED)
    assert [row.step for row in second.metrics] == [4, 5]
    follows(second, config, 3)
    assert second.metrics[0].evaluation == pytest.approx(averaged(config), rel=1e-10)
    assert train.read_model(tmp_path).config == config


def test_a_resume_that_names_no_schedule_nor_speed_goes_on_with_those_of_the_checkpoint(tmp_path):
    run(V3, plan(), steps=2, folder=tmp_path)
    sizes = {name: OPTIONS[name] for name in ("sequence_length", "global_batch", "batch_growth")}

    def resumed(**named):
        return train.run(V3, plan(), TEXT, steps=5, resume=tmp_path, weights=True, log_every=0, **sizes, **named)

    follows(resumed(), V3, 2)
    rates = [row.lr for row in resumed(schedule=train.LRSchedule()).metrics]
    assert rates == [OPTIONS["lr"]] * 3


NUM_STEPS = 60


def job(folder, chosen, resume):
    """A training that saves after every step, as `train.run` hands it to its ranks."""
    options = train.TrainOptions(**OPTIONS, folder=folder, save_every=1, keep=2, log_every=0)
    scratch = folder.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    return TrainJob(LLAMA, chosen, TEXT, None, NUM_STEPS, options, resume, None, False, scratch)


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
    follows(last, LLAMA, ends[-1], NUM_STEPS)
