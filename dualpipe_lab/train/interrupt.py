"""Ctrl-C during a training: the step ends, a checkpoint is saved, and the ranks stop together.

Chapter: book/whole/training.  In: SIGINT.  Out: a file that the ranks look for after each step.
The ranks of `launch` are detached from the terminal, so only the process that launched them is interrupted.  Under
`torchrun` every rank is, maybe at different steps; the exchange of the metrics makes all stop after the same one.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dualpipe_lab.world import torchrun
from dualpipe_lab.world.cluster.environment import cluster


@contextmanager
def stop_file(file: Path) -> Iterator[None]:
    """Make an interrupt inside of the `with` block create `file`; a second one interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return

    def on_interrupt(number: int, frame: Any) -> None:
        if file.exists() and not torchrun.is_active():  # torchrun repeats the signal by itself
            raise KeyboardInterrupt
        file.touch()
        started = cluster()
        if started is None or started.rank == 0:
            again = "" if started is not None else "; interrupt again to stop at once"
            print(f"\ninterrupted: the training stops after this step{again}", flush=True)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
