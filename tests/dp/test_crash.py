"""A process that dies while it saves leaves the previous checkpoint or the new one, whole."""

import os
import random
import signal
import threading
import time

import pytest
import torch
from models import launch
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.dp.checkpoint import Checkpoint, latest, save
from dualpipe_lab.dp.sharded import ZeroOptions
from dualpipe_lab.dp.zero1 import Zero1

NUM_RANKS = 2


def make(value, width):
    model = nn.Linear(width, 300, bias=False)
    nn.init.constant_(model.weight, value)
    return Zero1(model, options=ZeroOptions())


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def check(folder, width):
    """The newest checkpoint is whole, and of one save; return its step."""
    checkpoint = Checkpoint(latest(folder))
    assert set(checkpoint.names()) == {f"{kind}/weight" for kind in ("parameter", "exp_avg", "exp_avg_sq")}
    weight = checkpoint.read("parameter/weight")
    assert weight.shape == (300, width)
    assert torch.equal(weight, torch.full_like(weight, float(checkpoint.step)))
    return checkpoint.step


@pytest.mark.slow
def test_random_moments(tmp_path, amount):
    """kill -9 of one rank somewhere in a save of some megabytes, again and again on one folder."""
    width, trials = 3000, amount(20, 6)

    def time_a_save(rank, world_size):
        optimizer = make(1.0, width)
        before = time.perf_counter()
        save(tmp_path, 1, optimizer)
        return time.perf_counter() - before

    seconds = max(launch(time_a_save, NUM_RANKS))
    draw = random.Random(0)

    def fn(rank, world_size, step, victim, delay):
        optimizer = make(float(step), width)
        lab.comm.barrier()
        if rank == victim:
            timer = threading.Timer(delay, die)
            timer.daemon = True
            timer.start()
        save(tmp_path, step, optimizer, keep=2)
        time.sleep(60)  # the victim dies in any case

    steps = [1]
    for trial in range(trials):
        victim, delay = draw.randrange(NUM_RANKS), seconds * 1.3 * (trial + draw.random()) / trials
        with pytest.raises(lab.RankError, match="SIGKILL"):
            launch(fn, NUM_RANKS, steps[-1] + 1, victim, delay)
        steps.append(check(tmp_path, width))
        assert steps[-1] in (steps[-2], steps[-2] + 1)


@pytest.mark.parametrize("victim", range(NUM_RANKS))
def test_every_call_that_changes_the_disk(victim, tmp_path):
    """Death right before the first, second, ... such call of a save that also removes an old checkpoint."""
    width = 3

    def fn(rank, world_size, step, fatal):
        optimizer, calls = make(float(step), width), []

        def deadly(call):
            def wrapped(*args, **options):
                calls.append(call.__name__)
                if rank == victim and len(calls) == fatal:
                    die()
                return call(*args, **options)

            return wrapped

        for name in ("rename", "fsync", "mkdir", "unlink", "rmdir"):
            setattr(os, name, deadly(getattr(os, name)))
        save(tmp_path, step, optimizer, keep=1)
        return calls

    (first, second) = launch(fn, NUM_RANKS, 1, 0)
    assert {"mkdir", "fsync", "rename"} <= set(first)
    assert second.count("fsync") == 1
    step, outcomes = 1, []
    for fatal in range(1, 40):
        try:
            launch(fn, NUM_RANKS, step + 1, fatal)
        except lab.RankError:
            found = check(tmp_path, width)
            assert found in (step, step + 1)
            outcomes.append(found - step)
            step = found
        else:
            break  # the save made fewer calls than that
    assert set(outcomes) == ({0, 1} if victim == 0 else {0})  # rank 0 renames, so it can die after that, too
    assert len(outcomes) >= (8 if victim == 0 else 1)
    assert check(tmp_path, width) == step + 1
