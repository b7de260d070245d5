"""A training under torchrun's agents that is hit at a moment of its own: what the ranks of a drill do.

The phases are those of a rank: `start` before its first step (0 until the ranks have met and are watched over, then
1), `step`, `save`, `between` them, and `end` from the beginning of the last save until its process ends.  A moment is a
number of calls, of Python's functions and of C's, since the phase began: an undisturbed training counts them, and the
rank that reaches the number strikes by itself, so that the blow falls inside of the phase.  Where a phase turns out
shorter, the blow comes at its end.
"""

import fcntl
import os
import signal
import socket
import struct
import sys
import time
from importlib import import_module
from pathlib import Path

import dualpipe_lab as lab
from dualpipe_lab import data, dp, models, train
from dualpipe_lab.world.emulate.hosts import INTERFACE
from torchrun_cases.kinds import be_a_script, say

STEPS = 6
CONFIG = models.LlamaConfig(hidden_size=16, ffn_size=32, num_layers=4, num_heads=2, num_kv_heads=2)
PLAN = {"pp": 2, "dp": 2, "zero": 1, "num_microbatches": 2, "precision": "float64"}
OPTIONS = {
    "sequence_length": 16,
    "global_batch": 8,
    "hyperparameters": dp.Hyperparameters(lr=1e-2),
    "schedule": train.Schedule("cosine", num_warmup=2, num_steps=STEPS, final=0.1),
    "save_every": 1,
    "keep": 2,
    "log_every": 0,
}
SET_FLAGS = 0x8914  # SIOCSIFFLAGS of Linux


class Phases:
    """Notes which phase this rank is in, and strikes in one of them.

    Args:
        notes: a file, one line per phase: time, name, count, and the calls since the phase before began.
        blow: phase, count, calls and victim; None for a training that is left alone.
    """

    def __init__(self, notes, blow):
        self._notes = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._blow, self._is_near, self._calls = blow, False, 0

    def begin(self, name, count=0):
        """Begin a phase, and end the one before."""
        sys.setprofile(None)
        if self._is_near:
            self._strike("its end")
        self._note(f"{name} {count} {self._calls}")
        self._calls = 0
        self._is_near = self._blow is not None and (self._blow["phase"], self._blow["count"]) == (name, count)
        if self._is_near or self._blow is None:
            sys.setprofile(self._count)

    def _count(self, frame, event, argument):
        if "call" not in event:
            return
        self._calls += 1
        if self._is_near and self._calls >= self._blow["calls"]:
            sys.setprofile(None)
            self._strike(f"{getattr(argument, '__name__', '')} in {frame.f_code.co_qualname}")

    def _strike(self, where):
        self._is_near = False
        self._note(f"struck {self._blow['phase']} {self._blow['count']} {where}")
        strike(self._blow["victim"])

    def _note(self, text):
        os.write(self._notes, f"{time.time():.4f} {text}\n".encode())


def strike(victim):
    """Kill this rank, its agent, or all of its host at once, whose link goes down first: no connection is closed."""
    me, agent = os.getpid(), os.getppid()
    if victim == "rank":
        os.kill(me, signal.SIGKILL)
    elif victim == "agent":
        os.kill(agent, signal.SIGKILL)
    else:
        ranks = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sH14x", INTERFACE.encode(), 0))
        for pid in (agent, *(int(rank) for rank in ranks if int(rank) != me), me):
            os.kill(pid, signal.SIGKILL)


def main(job, timeout):
    """One rank of a training.

    Args:
        job: `folder` of checkpoints, `notes` of ranks, `plan`, and the `blow` with its `rank`; only the first start is
            hit.
        timeout: seconds of the launch.
    """
    be_a_script()
    agent = os.getppid()
    rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    blow = job["blow"]
    is_hit = blow is not None and int(rank) == blow["rank"] and restart == "0"
    quiet = {"phase": "never", "count": 0}
    phases = Phases(
        f"{job['notes']}/{job['start']}-{restart}-{rank}", None if job["counts"] else blow if is_hit else quiet
    )
    announce(import_module(train.run.__module__), phases, job.get("pause", 0.0))
    phases.begin("start")
    arguments = CONFIG, lab.Plan(**PLAN | job["plan"]), data.frozen_corpus()
    files = {"folder": job["folder"], "csv": f"{job['folder']}-curve.csv"}
    try:
        train.run(*arguments, steps=STEPS, elastic=True, timeout=timeout, **files, **OPTIONS | job.get("options", {}))
    except (lab.RankError, lab.RankTimeout, ConnectionError) as error:
        say(f"RAISED {rank} {type(error).__name__}: {error}\nEND {rank}")
        sys.exit(1)
    say(f"THROUGH {rank} {restart}")
    phases.begin("ended")
    if os.getppid() != agent:
        os._exit(0)  # as a script would; a fork of torch's waits until its agent has read what it returned


def announce(training, phases, pause):
    """Let the phases know when the training, a step or a save begins and ends; `pause`: seconds before each step."""
    train_rank, step, save = training.train_rank, training.Trainer.step, training.Trainer.save

    def trained(rank, world_size, job):
        phases.begin("start", 1)
        return train_rank(rank, world_size, job)

    def stepped(self, batch):
        phases.begin("between", self.num_steps)
        time.sleep(pause)
        phases.begin("step", self.num_steps + 1)
        row = step(self, batch)
        phases.begin("between", self.num_steps)
        return row

    def saved(self, sampler):
        is_last = self.num_steps == STEPS
        phases.begin("end" if is_last else "save", self.num_steps)
        path = save(self, sampler)
        if not is_last:
            phases.begin("between", self.num_steps)
        return path

    training.train_rank, training.Trainer.step, training.Trainer.save = trained, stepped, saved
