"""`Metrics`: what one step measured, on the screen and in a CSV file; `StepMeter`: what one rank measures.

Chapter: book/whole/training.  In: one report per rank and step.  Out: one row per step.
  loss              sum over the ranks of their summands
  bubble fraction   1 - busy time of all ranks / (ranks * time from the first to the last action), from the trace
  bytes sent        of the step's own messages, per rank: pipeline, gradients, weights; the metrics are not counted
The readings of all ranks travel in one all-gather of a few numbers, after the step and the count of its bytes.
Elsewhere: torchtitan `MetricsProcessor`, which reduces each metric in a message of its own.
"""

import csv
import os
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path

import torch

from dualpipe_lab import comm
from dualpipe_lab.launch.context import device, now, rank_context
from dualpipe_lab.launch.operating_system import peak_memory_bytes


@dataclass(frozen=True)
class Metrics:
    """What one step measured."""

    step: int  # from 1
    loss: float  # mean over all valid targets of the step
    norm: float | None  # of the gradient of the full model, before clipping; None without clipping
    lr: float
    tokens_per_second: float  # over all ranks
    bubble: float  # idle share of the pipeline, all ranks and the actions' time alone
    sent_bytes: tuple[int, ...]  # by rank
    peak_bytes: tuple[int, ...]  # by rank, the most memory of its process so far (on a GPU: of its tensors)
    stepped: bool = True  # False if the norm was not finite and no weight was updated
    evaluation: float | None = None  # the loss of the evaluation after this step, if there was one

    def numbers(self) -> dict[str, float]:
        """Return the row for files: numbers by name, the largest of each rank's."""
        found = {name: value for name, value in asdict(self).items() if name not in ("sent_bytes", "peak_bytes")}
        found |= {"sent_bytes": max(self.sent_bytes), "peak_bytes": max(self.peak_bytes)}
        return {name: float("nan") if value is None else value for name, value in found.items()}

    def cells(self) -> dict[str, str]:
        """Return the row for the screen, by column."""
        return {
            "step": str(self.step),
            "loss": f"{self.loss:.4f}",
            "norm": "" if self.norm is None else f"{self.norm:.4g}",
            "lr": f"{self.lr:.3g}",
            "tokens/s": f"{self.tokens_per_second:,.0f}",
            "bubble": f"{self.bubble:.0%}",
            "sent (max)": _amount(max(self.sent_bytes)),
            "peak (max)": _amount(max(self.peak_bytes)),
            "evaluation": "" if self.evaluation is None else f"{self.evaluation:.4f}",
        }

    def __str__(self) -> str:
        named = ((name.removesuffix(" (max)"), cell) for name, cell in self.cells().items() if cell)
        words = (f"{cell} {name}" if name == "tokens/s" else f"{name} {cell}" for name, cell in named)
        return "  ".join(words) + ("" if self.stepped else "  not finite: no update")


_NAMES = [field.name for field in fields(Metrics)]


def table(rows: Sequence[Metrics]) -> str:
    """Return rows as a table."""
    found = [row.cells() for row in rows]
    lines = [list(found[0]), *(list(cells.values()) for cells in found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


class MetricsFile:
    """Appends each row to a CSV file, as soon as there is one; without a file nothing is written.

    A file that exists is continued: rows from step `first` on, of an interrupted run, are replaced.
    """

    def __init__(self, file: str | Path | None, first: int = 1) -> None:
        self._file = None if file is None else Path(file)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            _keep_before(self._file, first)

    def write(self, row: Metrics) -> None:
        """Append one row."""
        if self._file is not None:
            with self._file.open("a", newline="") as file:
                csv.DictWriter(file, _NAMES).writerow(row.numbers())


def _keep_before(path: Path, first: int) -> None:
    """Leave the header and the complete rows before a step in a file; whenever this is killed, no row is lost."""
    read = read_csv(path) if path.exists() else []
    complete = [row for row in read if None not in row.values()]  # a kill may have cut the last one short
    hidden = path.with_name(f".{path.name}.saving")
    with hidden.open("w", newline="") as file:
        writer = csv.DictWriter(file, _NAMES)
        writer.writeheader()
        writer.writerows(row for row in complete if int(float(row["step"])) < first)
    os.replace(hidden, path)


def read_csv(file: str | Path) -> list[dict[str, str]]:
    """Return the rows of a metrics file, by column."""
    with Path(file).open(newline="") as text:
        return list(csv.DictReader(text))


def check_csv(file: str | Path) -> None:
    """Raise ValueError for a file that is a folder, or has something else than metrics: it would be lost."""
    path = Path(file)
    if path.is_dir():
        raise ValueError(f"csv is a file for metrics, got the folder {path}; name a file in it")
    if path.exists() and path.stat().st_size and path.read_text(errors="replace").split("\n")[0].split(",") != _NAMES:
        raise ValueError(f"{path} has no metrics in its first line, and would be replaced; name another file")


def _amount(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} GB"


@dataclass(frozen=True)
class Reading:
    """What one rank measured in one step."""

    loss: float  # this rank's summand
    seconds: float
    start: float  # of the pipeline's actions, in nanoseconds, as `end` and `busy`
    end: float
    busy: float
    sent_bytes: float
    peak_bytes: float  # of the process, or on a GPU of its tensors
    wants_stop: float  # 1 if this rank was asked to stop


class StepMeter:
    """Measures one step after the other; the trace then holds the last one."""

    def start(self) -> None:
        """Begin a step: forget the spans and messages of the one before."""
        rank_context().trace.forget()
        self._sent, self._started = _sent_bytes(), now()

    def stop(self, loss: float, wants_stop: bool) -> Reading:
        """End the step, and return what was measured."""
        seconds, sent = (now() - self._started) / 1e9, _sent_bytes() - self._sent
        actions = [span for span in rank_context().trace.spans if span.actions]
        start = float(min((span.start for span in actions), default=self._started))
        end = float(max((span.end for span in actions), default=start))
        busy = float(sum(span.end - span.start for span in actions))
        here = device()
        peak = peak_memory_bytes() if here.type != "cuda" else torch.cuda.max_memory_allocated(here)
        return Reading(loss, seconds, start, end, busy, sent, float(peak), float(wants_stop))


def exchange(reading: Reading) -> list[Reading]:
    """Return the readings of all ranks, in rank order; every rank calls this."""
    local = torch.tensor(astuple(reading), dtype=torch.float64, device="cpu")  # read by the host: it travels on GLOO
    rows = local.new_empty(comm.get_world_size() * len(local))
    comm.all_gather_single(rows, local)
    return [Reading(*row) for row in rows.view(-1, len(local)).tolist()]


def bubble_fraction(readings: list[Reading]) -> float:
    """Return the idle share of all ranks between the first and the last action of a step."""
    span = max(reading.end for reading in readings) - min(reading.start for reading in readings)
    return 1 - sum(reading.busy for reading in readings) / (len(readings) * span) if span else 0.0


def _sent_bytes() -> int:
    return sum(entry.sent for entry in rank_context().ledger.entries.values())
