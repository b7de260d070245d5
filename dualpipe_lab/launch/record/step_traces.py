"""`StepTraces` writes the trace of some steps of a long run, a file per rank; `read_traces` makes timelines of them.

Chapter: book/appendix/gpus.  In: a folder, which steps.  Out: `run-0000/rank-00003.jsonl` in it; a `Timeline`.
A rank keeps the events of one step, and no more, whatever the length of the run.  Its file has one JSON value per line,
so that a rank that dies leaves all of its whole lines:
  head    {"format", "rank", "world_size", "host", "pid", "every"}
  clock   {"clock": [time, gained, bound]}     what rank 0's clock has gained on this one since the start, +- bound
  step    {"step", "forgotten", "spans", "collectives", "sent", "received"}
Times are nanoseconds of the rank's own clock since all ranks started.
Elsewhere: `torch.profiler.schedule(wait, warmup, active)` and `prof.step()`; Kineto writes one file per rank too.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from socket import gethostname
from typing import IO, Any

from dualpipe_lab.launch.cluster.clocks import ClockReading, correct
from dualpipe_lab.launch.context import RankContext, rank_context
from dualpipe_lab.launch.record.trace import RankTrace, Received, Sent, match, to_timeline
from dualpipe_lab.timeline import COMMUNICATION, Timeline
from dualpipe_lab.timeline.json_form import pack_span, unpack_span

FORMAT = "dualpipe-lab/trace/2"


class StepTraces:
    """Writes the traces of some steps; every rank makes one, in the same place of the program.

    with StepTraces("traces", every=100) as traces:
        for step in range(10_000):
            with traces.step(step):
                ...

    Args:
        folder: of all runs; each run makes a folder of its own in it.
        every: one of so many steps is recorded.

    Attributes:
        path: of this rank's file.

    Raises:
        RuntimeError: outside of a rank.
        ValueError: `every` is less than 1.
    """

    def __init__(self, folder: str | Path, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"one of so many steps is recorded, got every={every}; use 1 or more")
        self._context, self._every = rank_context(), every
        context = self._context
        self.path = _run_folder(Path(folder), context) / f"rank-{context.rank:05d}.jsonl"
        self._file: IO[str] = open(self.path, "x", encoding="utf-8")  # noqa: SIM115  closed by `__exit__`
        sizes = {"rank": context.rank, "world_size": context.world_size, "every": every}
        self._write({"format": FORMAT, **sizes, "host": gethostname(), "pid": os.getpid()})
        self._read_clock()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record the `with` block as a step, if it is one of those that are recorded; every rank calls this."""
        self._context.trace.forget()
        yield
        if step % self._every == 0:
            self._write(pack_step(step, self._context.trace))
            self._read_clock()

    def __enter__(self) -> "StepTraces":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def _read_clock(self) -> None:
        """Note how far this clock is off rank 0's by now; ranks of one machine share a clock.

        Between two readings the correction is a straight line, its error at most the larger bound.
        """
        self._write({"clock": self._context.gained()})

    def _write(self, values: dict[str, Any]) -> None:
        self._file.write(f"{json.dumps(values, separators=(',', ':'))}\n")
        self._file.flush()  # what a rank has recorded is in the file if it dies in the next step


def _run_folder(folder: Path, context: RankContext) -> Path:
    from dualpipe_lab.comm import all_gather_object

    folder.mkdir(parents=True, exist_ok=True)
    taken = [int(found[1]) for path in folder.iterdir() if (found := re.fullmatch(r"run-(\d{4,})", path.name))]
    number = max(all_gather_object(max(taken, default=-1))) + 1
    made = folder / f"run-{number:04d}"
    made.mkdir(exist_ok=True)
    return made


def pack_step(step: int, trace: RankTrace) -> dict[str, Any]:
    """Return what a rank recorded in one step as plain JSON values."""
    return {
        "step": step,
        "forgotten": [[*channel, number] for channel, number in trace.forgotten.items()],
        "spans": [pack_span(span) for span in trace.spans],
        "collectives": [pack_span(span) for span in trace.collectives],
        "sent": trace.sent,
        "received": trace.received,
    }


def unpack_step(rank: int, values: dict[str, Any]) -> RankTrace:
    """Return the trace that `pack_step` wrote."""
    return RankTrace(
        rank,
        [unpack_span(rank, row) for row in values["spans"]],
        [unpack_span(rank, row) for row in values["collectives"]],
        [Sent(*row) for row in values["sent"]],
        [Received(*row) for row in values["received"]],
        Counter({(peer, stream): number for peer, stream, number in values["forgotten"]}),
    )


@dataclass(frozen=True)
class Traces:
    """The traces of one run.

    Attributes:
        path: of the run's folder.
        world_size: number of ranks of the run.
        by_rank: of the ranks whose files are here, the trace of each recorded step, on rank 0's clock.
    """

    path: Path
    world_size: int
    by_rank: dict[int, dict[int, RankTrace]] = field(repr=False)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks whose files are not here."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.by_rank)

    @property
    def steps(self) -> list[int]:
        """The steps that some rank recorded, in order."""
        return sorted({step for found in self.by_rank.values() for step in found})

    def timeline(self, steps: Sequence[int] | None = None) -> Timeline:
        """Return the timeline of some steps (default: of all), from its first event on.

        The collectives of each rank are a stream of their own.  A message is drawn if both of its ends were recorded.

        Raises:
            ValueError: a step that no rank recorded.
        """
        chosen = self.steps if steps is None else sorted(steps)
        if unknown := [step for step in chosen if step not in self.steps]:
            raise ValueError(f"{self.path} has no step {unknown[0]}; it has {_listed(self.steps)}")
        recorded = [self.by_rank.get(rank, {}) for rank in range(self.world_size)]
        rows = [[found[step] for step in chosen if step in found] for found in recorded]
        joined = [
            RankTrace(
                rank,
                [span for one in row for span in one.spans],
                error_ns=max((one.error_ns for one in row), default=0),
            )
            for rank, row in enumerate(rows)
        ]
        collectives = [[span for one in row for span in one.collectives] for row in rows]
        messages = match(list(chain.from_iterable(rows))).messages
        found = to_timeline(joined, messages, "wall", f"{self.path.name}, {_listed(chosen)}")
        if any(collectives):
            found = found.with_stream(COMMUNICATION, collectives)
        ends = [time for spans in found.spans_by_rank for span in spans for time in (span.start, span.end)]
        return found.between(min(ends), max(ends) + 1) if ends else found


def read_traces(folder: str | Path) -> Traces:
    """Read the trace files of one run; of a folder of runs the last one.

    Args:
        folder: a run's own folder, or the folder of all runs that `StepTraces` got.

    Raises:
        ValueError: there are no files, or they belong to different runs.
    """
    path = Path(folder)
    if runs := sorted(path.glob("run-*")):
        path = runs[-1]
    files = [_read(each) for each in sorted(path.glob("rank-*.jsonl"))]
    if not files:
        raise ValueError(f"{folder} has no trace files, run-0000/rank-00000.jsonl; name the folder that StepTraces got")
    sizes = {int(head["world_size"]) for head, _ in files}
    if len(sizes) > 1:
        raise ValueError(f"{path} has files of worlds of {sorted(sizes)} ranks; put the files of one run into a folder")
    return Traces(path, sizes.pop(), {int(head["rank"]): steps for head, steps in files})


def _read(path: Path) -> tuple[dict[str, Any], dict[int, RankTrace]]:
    """Return the head of a file, and its steps on the clock of rank 0."""
    lines = path.read_text(encoding="utf-8").split("\n")
    values = [json.loads(line) for line in lines[:-1]]  # a line that a dying rank has begun has no end
    if not values or values[0].get("format") != FORMAT:
        raise ValueError(f"{path} does not begin with the format {FORMAT!r}; it is no trace of a rank")
    head, *rest = values
    steps = {line["step"]: unpack_step(head["rank"], line) for line in rest if "step" in line}
    readings = [ClockReading(*line["clock"]) for line in rest if "clock" in line]
    for trace in steps.values():
        correct(trace, readings)
    return head, steps


def _listed(steps: Sequence[int]) -> str:
    if len(steps) < 2:
        return f"step {steps[0]}" if steps else "no steps"
    is_dense = len(steps) == steps[-1] - steps[0] + 1
    return f"steps {steps[0]} to {steps[-1]}" + ("" if is_dense else f", {len(steps)} of them")
