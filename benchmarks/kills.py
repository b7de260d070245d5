"""kill -9 at any moment of a training that saves after every step, and what the resumed training ends with.

A training of two ranks runs in processes of its own, and is killed: one rank, or the process that launched them, whose
ranks must then end by themselves; at moments that are named (inside of the first step, of an evaluation, of a save:
before a file is written, before the index, on both sides of the rename, during the removal of an old checkpoint), and
at random ones.  Then it goes on from the last complete checkpoint, under the same plan and under another one.

  same plan      the last weights equal those of a training that nothing interrupted, bit by bit
  another plan   they are off by rounding: relative to the largest weight
  left over      processes of the killed training after some seconds; names that the next save or launch leaves there

    python benchmarks/kills.py [--random 8] [--seed 0]          Linux: processes are found in /proc
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import dualpipe_lab as lab
from dualpipe_lab import data, dp, models, train

STEPS, BOUND = 6, 1e-8
PATIENCE = 20.0  # seconds in which the ranks of a dead launcher end
ONES_FOLDERS = 2  # of one killed training: that of the training and that of the launch
RUN = import_module(train.run.__module__)  # the function has the name of its module
SESSION = import_module(dp.checkpoint.save.__module__)
MARK = "DUALPIPE_LAB_KILLS"  # in the environment of every process of a training: its spec
CONFIG = models.LlamaConfig(hidden_size=16, ffn_size=32, num_layers=4, num_heads=2, num_kv_heads=2)
OPTIONS: dict[str, Any] = {
    "sequence_length": 16,
    "global_batch": 8,
    "lr": 1e-2,
    "schedule": train.LRSchedule("cosine", num_warmup=2, num_steps=STEPS, final=0.1),
    "evaluation": data.frozen_corpus("evaluation"),
    "evaluate_every": 2,
    "save_every": 1,
    "keep": 2,
    "log_every": 0,
}
PLAN = lab.Plan(dp=2, zero=1, precision="float64")
OTHERS = [
    lab.Plan(pp=2, num_microbatches=4, schedule="dualpipe", precision="float64"),
    lab.Plan(tp=2, precision="float64"),
    lab.Plan(dp=2, zero=3, precision="float64"),
    lab.Plan(precision="float64"),
]


@dataclass(frozen=True)
class Kill:
    """When, and what is killed.

    Attributes:
        victim: a rank, or None for the process that launched them.
        place: a name of `PLACES`, or "random".
        count: at the so-manieth time that a rank comes there.
        seconds: after the start of the training, for a random one.
    """

    victim: int | None
    place: str
    count: int = 1
    seconds: float = 0.0

    def __str__(self) -> str:
        who = "all" if self.victim is None else f"rank {self.victim}"
        return f"{who}: {self.place} {f'{self.seconds:.2f} s' if self.place == 'random' else self.count}"


PLACES: dict[str, tuple[Any, str]] = {  # where a rank comes: the owner of a function, and its name
    "step": (train.Trainer, "step"),
    "gradients complete": (dp.Zero1, "step"),
    "evaluation": (train.Trainer, "evaluate"),
    "save": (train.Trainer, "save"),
    "file": (SESSION, "write_tensors"),
    "before the rename": (SESSION.folders, "commit"),
    "after the rename": (SESSION.folders, "rotate"),
    "removal": (SESSION.folders.shutil, "rmtree"),
}
NAMED = [
    Kill(1, "step", 1),
    Kill(0, "gradients complete", 2),
    Kill(None, "evaluation", 1),
    Kill(1, "save", 2),
    Kill(1, "file", 3),
    Kill(0, "before the rename", 1),
    Kill(None, "before the rename", 3),
    Kill(0, "after the rename", 2),
    Kill(None, "removal", 1),
]


def drawn(count: int, seed: int, seconds: float) -> list[Kill]:
    """Kills at random moments within so many seconds, of the launcher and of both ranks."""
    draw = random.Random(seed)
    return [Kill(draw.choice([None, 0, 1]), "random", 1, draw.uniform(0, seconds)) for _ in range(count)]


def watched(rank: int, world_size: int, job: Any) -> Any:
    """In a rank: train, note what is going on, and kill when it is time."""
    spec = json.loads(os.environ[MARK])
    kill, launcher, notes = Kill(**spec["kill"]), spec["launcher"], Path(spec["notes"]) / f"rank-{rank}"
    for place, (owner, name) in PLACES.items():
        setattr(owner, name, noting(place, getattr(owner, name), notes, kill, rank, launcher))
    if kill.place == "random" and rank == (kill.victim or 0):
        timer = threading.Timer(kill.seconds, strike, (kill, launcher))
        timer.daemon = True
        timer.start()
    return RUN.train_rank(rank, world_size, job)


def noting(
    place: str, function: Callable[..., Any], notes: Path, kill: Kill, rank: int, launcher: int
) -> Callable[..., Any]:
    """Wrap a function: a file says since when the rank is in it; the kill comes as it begins."""
    counts = {"calls": 0}

    def noted(*arguments: Any, **options: Any) -> Any:
        counts["calls"] += 1
        before = notes.read_text() if notes.exists() else "start"
        notes.write_text(f"{place} {counts['calls']}")
        if (kill.place, kill.count, kill.victim or 0) == (place, counts["calls"], rank):
            strike(kill, launcher)
        found = function(*arguments, **options)
        notes.write_text(before if place != "step" else f"after step {counts['calls']}")
        return found

    return noted


def strike(kill: Kill, launcher: int) -> None:
    """Kill this rank, or the launcher: then the ranks find out by themselves."""
    os.kill(os.getpid() if kill.victim is not None else launcher, signal.SIGKILL)
    if kill.victim is None:
        time.sleep(3600)


def child(folder: str) -> None:
    """The killed training: what `train.run` does, with ranks that are watched."""
    spec = json.loads(os.environ[MARK])
    os.environ[MARK] = json.dumps(spec | {"launcher": os.getpid()})
    RUN.train_rank = watched  # type: ignore[attr-defined]
    train.run(CONFIG, PLAN, data.frozen_corpus(), steps=STEPS, folder=folder, timeout=600, **OPTIONS)


@dataclass
class Row:
    """What became of one killed training."""

    kill: Kill
    going_on: str
    step: int | None
    is_equal: bool
    distance: float
    other: str
    left_over: list[str]

    @property
    def is_right(self) -> bool:
        """Equal weights, and nothing left over."""
        return self.is_equal and self.distance < BOUND and not self.left_over


def killed(kill: Kill, other: lab.Plan, right: dict[str, torch.Tensor], folder: Path) -> Row:
    """Kill a training, resume it twice, and compare."""
    saved, notes, temporary = folder / "saved", folder / "notes", folder.parent / "tmp"  # temporary: of all trainings
    for each in (saved, notes, temporary):
        each.mkdir(parents=True, exist_ok=True)
    spec = json.dumps({"kill": asdict(kill), "notes": str(notes)})
    environment = os.environ | {MARK: spec, "TMPDIR": str(temporary)}
    command = [sys.executable, __file__, "--child", str(saved)]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False, text=True
    )
    left_over = [f"process {process}" for process in survivors(str(notes))]
    if done.returncode == 0 and kill.place != "random":
        left_over.append("it was not killed")
    steps = dp.checkpoint.saved_steps(saved)
    shutil.copytree(saved, folder / "copy")
    same, further = (resumed(plan, folder / name) for plan, name in ((PLAN, "saved"), (other, "copy")))
    left_over += [name for name in os.listdir(saved) if not name.startswith("step-")]
    folders = [name for name in os.listdir(temporary) if name.startswith("dualpipe-lab-")]
    left_over += folders if len(folders) > ONES_FOLDERS else []  # the next training removes those of this one
    largest = max(float(tensor.abs().max()) for tensor in right.values())
    return Row(
        kill,
        ", ".join(f"{file.name.removeprefix('rank-')}: {file.read_text()}" for file in sorted(notes.iterdir())),
        steps[-1] if steps else None,
        all(torch.equal(same[name], tensor) for name, tensor in right.items()),
        max(float((further[name] - tensor).abs().max()) for name, tensor in right.items()) / largest,
        str(other).removesuffix(", float64"),
        left_over,
    )


def resumed(plan: lab.Plan, folder: Path) -> dict[str, torch.Tensor]:
    """The last weights of a training that goes on in a folder, from its last checkpoint if there is one."""
    steps = dp.checkpoint.saved_steps(folder)
    if steps and steps[-1] == STEPS:
        return train.Result("", [], dp.checkpoint.latest(folder)).weights()
    resume = folder if steps else None
    arguments = CONFIG, plan, data.frozen_corpus()
    return train.run(*arguments, steps=STEPS, folder=folder, resume=resume, timeout=600, **OPTIONS).weights()


def survivors(mark: str) -> list[str]:
    """Processes whose environment has the mark, after they had some seconds to end by themselves."""
    until = time.monotonic() + PATIENCE
    while (found := list(marked(mark))) and time.monotonic() < until:
        time.sleep(0.2)
    return found


def marked(mark: str) -> Iterator[str]:
    """The numbers of the living processes that were started with a mark in their environment."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                yield entry.name
        except OSError:
            continue  # it has ended, or is another user's


def rows(kills: list[Kill], folder: Path) -> Iterator[Row]:
    """Kill and resume, one after the other."""
    torch.set_num_threads(1)
    right = resumed(PLAN, folder / "right")
    for number, kill in enumerate(kills):
        yield killed(kill, OTHERS[number % len(OTHERS)], right, folder / str(number))


def main() -> None:
    """Print the table; fail if a resumed training differs, or something is left over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1.0, help="in which the random moments lie")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        return child(chosen.child)
    table = Table("killed", "what was going on, by rank", "checkpoint", "same plan", "other plan", "left over")
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for row in rows([*NAMED, *drawn(chosen.random, chosen.seed, chosen.seconds)], Path(folder)):
            equal, left = "equal bits" if row.is_equal else "DIFFERENT", ", ".join(row.left_over) or "nothing"
            step = "none" if row.step is None else f"step {row.step}"
            table.add_row(str(row.kill), row.going_on, step, equal, f"{row.distance:.1e}: {row.other}", left)
            print(f"{row.kill}: {step}, {equal}, {row.distance:.1e}, {left}", flush=True)
            wrong += [] if row.is_right else [row]
    Console(width=150).print(table)
    if wrong:
        sys.exit(f"{len(wrong)} of {table.row_count} killed trainings did not end as they should")
    return None


if __name__ == "__main__":
    main()
