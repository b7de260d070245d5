"""`Screen`: a progress bar on a terminal, lines elsewhere; `append` and `follow` bring the rows of rank 0 to it.

Chapter: book/whole/training.  In: metrics.  Out: text.
Under `launch` a rank's output is a pipe, so rank 0 appends each row to a file, and a thread beside `launch` shows it.
Under `torchrun` rank 0 has the terminal itself.
Elsewhere: tqdm, `lightning`'s RichProgressBar.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Event, Thread
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dualpipe_lab.train.metrics import Metrics

_POLL_SECONDS = 0.2


class Screen(Progress):
    """Shows the rows of a training, one of `log_every`; as a context manager it draws the bar and removes it."""

    def __init__(self, num_steps: int, log_every: int) -> None:
        self._last, self._every = num_steps, log_every
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        super().__init__(*columns, disable=not sys.stdout.isatty(), transient=True)
        self._task = self.add_task("training", total=num_steps)

    def show(self, row: Metrics) -> None:
        """Move the bar, and print the row if it is due."""
        self.update(self._task, completed=row.step, description=f"loss {row.loss:.4f}")
        is_due = self._every and (row.step % self._every == 0 or row.step in (1, self._last))
        if is_due or (self._every and row.evaluation is not None):
            if self.disable:
                print(row, flush=True)
            else:
                self.console.print(str(row), soft_wrap=True, markup=False, highlight=False)


def append(file: Path, row: Metrics) -> None:
    """Append a row to the file that another process follows."""
    with file.open("a") as text:
        text.write(json.dumps(asdict(row)) + "\n")


@contextmanager
def follow(file: Path, screen: Screen) -> Iterator[None]:
    """Show the rows of a file inside of the `with` block, as they are appended."""
    file.touch()
    done = Event()
    with file.open() as text, screen:
        thread = Thread(target=_show_rows, args=(text, screen, done), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _show_rows(text: Any, screen: Screen, done: Event) -> None:
    part, is_last = "", False
    while not is_last:
        is_last = done.wait(_POLL_SECONDS)
        while line := text.readline():
            part += line
            if part.endswith("\n"):  # else it is still being written
                screen.show(Metrics(**json.loads(part)))
                part = ""
