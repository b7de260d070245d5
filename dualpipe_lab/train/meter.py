"""`Meter`: time, idle time, bytes and memory of one step on this rank, and the exchange of these numbers.

Chapter: book/whole/training.  In: the rank's clock, trace and ledger.  Out: one row of numbers per rank.
The exchange is one all-gather of a few numbers, after the step; the step's own bytes are read before it.
Elsewhere: torchtitan `MetricsProcessor`, which reduces each metric in a message of its own.
"""

from dataclasses import astuple, dataclass

import torch

from dualpipe_lab import comm
from dualpipe_lab.launch.context import device, now, rank_context
from dualpipe_lab.launch.operating_system import peak_memory_bytes

_NS = 1e9


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


class Meter:
    """Measures one step after the other; the trace then holds the last one."""

    def start(self) -> None:
        """Begin a step: forget the spans and messages of the one before."""
        rank_context().trace.forget()
        self._sent, self._started = _sent_bytes(), now()

    def stop(self, loss: float, wants_stop: bool) -> Reading:
        """End the step, and return what was measured."""
        seconds, sent = (now() - self._started) / _NS, _sent_bytes() - self._sent
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
    """Return the idle share of all ranks between the first and the last action of a step.

    >>> first, second = (Reading(0, 1, start, start + 3, 3, 0, 0, 0) for start in (0, 1))
    >>> bubble_fraction([first, second])
    0.25
    """
    span = max(reading.end for reading in readings) - min(reading.start for reading in readings)
    return 1 - sum(reading.busy for reading in readings) / (len(readings) * span) if span else 0.0


def _sent_bytes() -> int:
    return sum(entry.sent for entry in rank_context().ledger.entries.values())
