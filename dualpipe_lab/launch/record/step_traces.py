"""`StepTraces`: the trace of some steps of a long run, written to a file per rank while the run goes on.

Chapter: book/appendix/gpus.  In: a folder, which steps.  Out: `run-0000/rank-00003.jsonl` in it.
A rank keeps the events of one step, and no more, whatever the length of the run.  Behind each recorded step the ranks
of several hosts read their clocks again, so that a drift is taken out piece by piece.
Elsewhere: `torch.profiler.schedule(wait, warmup, active)` and `prof.step()`; Kineto writes one file per rank too.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from typing import IO, Any

from dualpipe_lab.launch.context import RankContext, rank_context
from dualpipe_lab.launch.record.trace_format import FORMAT, pack_step


class StepTraces:
    """Writes the traces of some steps; every rank makes one, in the same place of the program.

    with StepTraces("traces", every=100) as traces:
        for step in range(10_000):
            with traces.step(step):
                ...

    Args:
        folder: of all runs; each run makes a folder of its own in it.
        every: a window begins at each multiple of it.
        length: steps of a window.

    Attributes:
        path: of this rank's file.

    Raises:
        RuntimeError: outside of a rank.
        ValueError: a window that is longer than the way to the next.
    """

    def __init__(self, folder: str | Path, every: int = 1, length: int = 1) -> None:
        if not 1 <= length <= every:
            raise ValueError(
                f"a window of steps begins every so many steps and ends before the next, got every={every} and "
                f"length={length}; use length=1 to {max(every, 1)}"
            )
        self._context, self._every, self._length = rank_context(), every, length
        context = self._context
        self.path = _run_folder(Path(folder), context) / f"rank-{context.rank:05d}.jsonl"
        self._file: IO[str] = open(self.path, "x", encoding="utf-8")  # noqa: SIM115  closed by `close`
        sizes = {"rank": context.rank, "world_size": context.world_size, "every": every, "length": length}
        self._write({"format": FORMAT, **sizes, "host": gethostname(), "pid": os.getpid()})
        self._read_clock()

    def records(self, step: int) -> bool:
        """Whether a step is recorded."""
        return step % self._every < self._length

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record the `with` block as a step, if it is one of those that are recorded; every rank calls this."""
        self._context.trace.forget()
        yield
        if self.records(step):
            self._write(pack_step(step, self._context.trace))
            self._read_clock()

    def close(self) -> None:
        """End the file; every rank calls this after its last step."""
        if not self._file.closed:
            self._write({"end": True})
            self._file.close()

    def __enter__(self) -> "StepTraces":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        self._file.close()  # a run that an error ends has no end

    def _read_clock(self) -> None:
        """Note how far this clock is off rank 0's by now; ranks of one machine share a clock."""
        self._write({"clock": self._context.gained()})

    def _write(self, values: dict[str, Any]) -> None:
        self._file.write(f"{json.dumps(values, separators=(',', ':'))}\n")
        self._file.flush()  # what a rank has recorded is in the file if it dies in the next step


def _run_folder(folder: Path, context: RankContext) -> Path:
    """Make the folder of this run, of one number on all hosts, and return it."""
    from dualpipe_lab.comm import all_gather_object

    folder.mkdir(parents=True, exist_ok=True)
    taken = [int(found[1]) for path in folder.iterdir() if (found := re.fullmatch(r"run-(\d{4,})", path.name))]
    number = max(all_gather_object(max(taken, default=-1))) + 1
    made = folder / f"run-{number:04d}"
    made.mkdir(exist_ok=True)
    return made
