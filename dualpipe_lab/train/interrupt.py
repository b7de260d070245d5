"""Ctrl-C, a preempted node and a time limit during a training: the step ends, a checkpoint is saved, all ranks stop.

Chapter: book/whole/training.  In: SIGINT, SIGTERM or SIGUSR1.  Out: a file that the ranks look for after each step.
  SIGINT     Ctrl-C
  SIGTERM    a node that is taken away: Kubernetes sends it, torchrun hands it on, and SIGKILL comes 30 s later
  SIGUSR1    a time limit that comes near: Slurm's `--signal`; torchrun hands it on with `--signals-to-handle`
The ranks of `launch` are detached from the terminal, so only the process that launched them gets the signal.  Under
`torchrun` every rank of a node does, maybe at different steps, and ranks of other nodes do not; the exchange of the
metrics makes all of them stop after the same step.  A rank that has not met the others yet has nothing to save and ends
at once: torchrun restarts no rank of its node before all have ended, and would kill it after 30 s.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dualpipe_lab.launch import operating_system, torchrun
from dualpipe_lab.launch.cluster.environment import cluster

EXIT_CODE = getattr(os, "EX_TEMPFAIL", 75)  # of a script whose training was stopped early: start it again to go on


@contextmanager
def stop_file(file: Path, begun: Path) -> Iterator[None]:
    """Make a signal inside of the `with` block create `file`; a second one stops at once, unless torchrun sends it.

    Args:
        file: that the ranks look for.
        begun: a file that a rank of torchrun's makes when it has met the others; before, a signal stops it at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return

    def on_signal(number: int, frame: Any) -> None:
        is_second = file.exists() and not torchrun.is_active()  # torchrun repeats the signal by itself
        if is_second or (torchrun.is_active() and not begun.exists()):
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        file.touch()
        started = cluster()
        if started is None or started.local_rank == 0:  # a node without rank 0 may be the one that is taken away
            name = "interrupted" if number == signal.SIGINT else f"interrupted by {signal.Signals(number).name}"
            again = "" if started is not None else "; interrupt again to stop at once"
            print(f"\n{name}: the training stops after this step{again}", flush=True)

    before = {number: signal.signal(number, on_signal) for number in operating_system.STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
