"""A stand-in for CUDA and NCCL, for machines without either: `DUALPIPE_LAB_ACCELERATOR=stand_in`.

In: what `dualpipe_lab.launch.accelerator` asks of an accelerator.  Out: a device that is memory of the CPU under a
mark, and a back end that is GLOO behind NCCL's refusals.
  tensors.py   tells "device" tensors from those of the host, and refuses to mix them, as CUDA does
  nccl.py      refuses what NCCL refuses, and runs operations in the order that its streams impose
`DUALPIPE_LAB_STAND_IN=suite` is for tests that were written without devices: what a test makes inside a rank, or hands
to it, is on the device; what the library makes is where the library says.
What it does not show: speed, the results of GPU kernels, asynchronous errors, and a `wait` that returns at once.
"""

import inspect
import os
import random
from time import perf_counter

import costs
import torch

ACCELERATOR, SUITE = "DUALPIPE_LAB_ACCELERATOR", "DUALPIPE_LAB_STAND_IN"
PATIENCE = 400  # seconds: every operation is looked at, so a launch takes many times as long as on GLOO
device_type, backend = "cuda", "standin"


class Event:
    """A point in time."""

    def record(self) -> None:
        self.time = perf_counter()

    def elapsed_time(self, end_event) -> float:
        return (end_event.time - self.time) * 1e3


def obstacle(world_size):
    """There is room for any number of ranks."""
    return ""


def start(local_rank):
    """Turn this process into a rank with a device: every operation from now on is looked at."""
    from stand_in import nccl, tensors

    nccl.register()
    tensors.enter(local_rank, suite=os.environ.get(SUITE) == "suite")
    return torch.device(device_type, local_rank)


def synchronize():
    """Nothing is queued: operations run when they are called."""


def event():
    return Event()


def rng_state(device):
    """The device draws from the generator of the CPU, so that seeded numbers are those of the CPU."""
    return torch.get_rng_state()


def set_rng_state(state, device):
    torch.set_rng_state(state)


def take_over():
    """Run every launch of this process on the stand-in, except those that emulate time or read sockets.

    A test's own time limit is for GLOO: it is raised to `PATIENCE`.  Ranks that wait for each other are found anyway.
    """
    from dualpipe_lab.launch import launcher
    from dualpipe_lab.launch.rank import LaunchConfig

    os.environ.update({ACCELERATOR: __name__, SUITE: "suite"})

    def configure(threads, link, clock, check, backend, wire):
        stays = link is not None or clock == "virtual" or wire or check
        return LaunchConfig(threads, link, clock, check, "gloo" if stays else "nccl", wire)

    def run_patiently(jobs, mode, timeout, start):
        return run(jobs, mode, max(timeout, PATIENCE), start)

    run, launcher._run = launcher._run, run_patiently
    launcher.LaunchConfig = configure


def draw(items):
    """One test of every third file, unless kept on GLOO: the middle case of the first that launches ranks itself.

    A dear test is drawn only where the file has no other.  The files are drawn with a fixed seed.
    """
    drawn = {}
    for item in sorted(items, key=costs.is_dear):
        function = getattr(item, "function", None)
        if function is None or item.get_closest_marker("on_gloo") or "launch(" not in inspect.getsource(function):
            continue
        name, cases = drawn.setdefault(item.path, (function, []))
        if name is function:
            cases.append(item)
    left = sorted(drawn, key=lambda path: random.Random(path.name).random())[: -(-len(drawn) // 3)]
    return [cases[len(cases) // 2] for path, (_, cases) in drawn.items() if path in left]
