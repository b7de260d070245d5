"""`StepTraces` writes the trace of some steps of a long run, a file per rank; `read_traces` makes timelines of them.

Chapter: book/appendix/gpus.  In: a folder, which steps.  Out: `run-0000/rank-00003.jsonl` in it; a `Timeline`.
A rank keeps the events of one step, and no more, whatever the length of the run.  Its file has one JSON value per line,
so that a rank that dies leaves all of its whole lines:
  head    {"format", "rank", "world_size", "host", "pid", "every"}
  clock   {"clock": [time, gained, bound]}     what rank 0's clock has gained on this one since the start, +- bound
  step    {"step", "partial", "forgotten", "spans", "collectives", "sent", "received"}
  end     {"end": true}                        the rank closed the file; without it the run was ended
Times are nanoseconds of the rank's own clock since all ranks started.
Elsewhere: `torch.profiler.schedule(wait, warmup, active)` and `prof.step()`; Kineto writes one file per rank too.
"""

import json
import os
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from socket import gethostname
from typing import IO, Any

from dualpipe_lab.launch.context import RankContext, rank_context
from dualpipe_lab.launch.record.trace import Matching, RankTrace, Received, Sent, clock_note, match, to_timeline
from dualpipe_lab.timeline import COMMUNICATION, Timeline
from dualpipe_lab.timeline.json_form import pack_span, unpack_span

FORMAT = "dualpipe-lab/trace/1"


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
        self._file: IO[str] = open(self.path, "x", encoding="utf-8")  # noqa: SIM115  closed by `close`
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
        "partial": trace.is_partial,
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
        is_partial=values["partial"],
    )


@dataclass
class RankFile:
    """What the file of one rank holds.

    Attributes:
        head: rank, world_size, host, pid, every.
        steps: the trace of each recorded step, by its number, on rank 0's clock.
        is_whole: the rank closed the file; False for a run that was ended.
        readings: time, gain and bound of each reading of the clock.
    """

    head: dict[str, Any]
    steps: dict[int, RankTrace] = field(default_factory=dict)
    is_whole: bool = False
    readings: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Traces:
    """The traces of one run.

    Attributes:
        path: of the run's folder.
        files: of the ranks that are here, by rank.
        missing: ranks whose files are not here.
    """

    path: Path
    files: dict[int, RankFile]
    missing: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks of the run."""
        return len(self.files) + len(self.missing)

    @property
    def steps(self) -> list[int]:
        """The steps that some rank recorded, in order."""
        return sorted({step for file in self.files.values() for step in file.steps})

    def matching(self, steps: Sequence[int] | None = None) -> Matching:
        """Match the messages of some steps (default: of all).

        Of a truncated one an end was not recorded: at the edge of a step, in a rank that was ended, in a file that is
        not here.  A lost one was sent before a step that the receiver recorded to its end, and was never received.
        """
        return match(list(chain.from_iterable(self._rows(steps))))

    def timeline(self, steps: Sequence[int] | None = None) -> Timeline:
        """Return the timeline of some steps (default: of all), from its first event on.

        The collectives of each rank are a stream of their own.

        Raises:
            ValueError: a step that no rank recorded.
        """
        rows = self._rows(steps)
        name = f"{self.path.name}, {_listed(self.steps if steps is None else sorted(steps))}"
        joined = [
            RankTrace(rank, [span for part in row for span in part.spans], error_ns=row[0].error_ns)
            for rank, row in enumerate(rows)
        ]
        collectives = [[span for part in row for span in part.collectives] for row in rows]
        whole = to_timeline(joined, self.matching(steps).messages, "wall", name)
        if any(collectives):
            whole = whole.with_stream(COMMUNICATION, collectives)
        ends = [time for spans in whole.spans_by_rank for span in spans for time in (span.start, span.end)]
        return whole.between(min(ends), max(ends) + 1) if ends else whole

    def __str__(self) -> str:
        found = self.matching()
        clocks = clock_note([row[0] for row in self._rows(None)]).removeprefix(", clocks ")
        hosts = sorted({str(file.head["host"]) for file in self.files.values()})
        lines = [
            f"{self.path}: {len(self.files)} of {self.world_size} ranks on {len(hosts)} host"
            f"{'s' * (len(hosts) > 1)} ({', '.join(hosts)}), {_listed(self.steps)}",
            f"messages: {len(found.messages)} matched, {len(found.lost)} lost, {found.truncated} with one end that was "
            "not recorded",
            f"clocks: {clocks or 'one for all ranks'}",
        ]
        if self.missing:
            lines.append(f"no file of ranks {', '.join(map(str, self.missing))}")
        if ended := [rank for rank, file in self.files.items() if not file.is_whole]:
            lines.append(f"ended without closing their files: ranks {', '.join(map(str, ended))}")
        return "\n".join(lines + found.lost[:5])

    def _rows(self, steps: Sequence[int] | None) -> list[list[RankTrace]]:
        chosen = self.steps if steps is None else sorted(steps)
        if unknown := [step for step in chosen if step not in self.steps]:
            raise ValueError(f"{self.path} has no step {unknown[0]}; it has {_listed(self.steps)}")
        return [_parts(rank, self.files.get(rank), chosen) for rank in range(self.world_size)]


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
    sizes = {int(file.head["world_size"]) for file in files}
    if len(sizes) > 1:
        raise ValueError(f"{path} has files of worlds of {sorted(sizes)} ranks; put the files of one run into a folder")
    by_rank = {int(file.head["rank"]): file for file in files}
    return Traces(path, by_rank, tuple(rank for rank in range(sizes.pop()) if rank not in by_rank))


def _read(path: Path) -> RankFile:
    lines = path.read_text(encoding="utf-8").split("\n")
    values = [json.loads(line) for line in lines[:-1]]  # a line that a dying rank has begun has no end
    if not values or values[0].get("format") != FORMAT:
        raise ValueError(f"{path} does not begin with the format {FORMAT!r}; it is no trace of a rank")
    file = RankFile(values[0])
    for line in values[1:]:
        if "step" in line:
            file.steps[line["step"]] = unpack_step(values[0]["rank"], line)
        elif "clock" in line:
            time, gained, bound = line["clock"]
            file.readings.append((time, gained, bound))
    file.is_whole = "end" in values[-1]
    for trace in file.steps.values():
        trace.move(_line(file.readings))
        trace.error_ns = max((bound for _, _, bound in file.readings), default=0)
    return file


def _line(readings: list[tuple[int, int, int]]) -> Callable[[int], int]:
    """The correction of a time: a straight line between each two readings, constant before and behind them.

    >>> move = _line([(0, 0, 5), (1_000, 100, 5), (2_000, 100, 5)])
    >>> [move(time) for time in (-10, 500, 1_500, 3_000)]
    [-10, 550, 1600, 3100]
    """
    times = [time for time, _, _ in readings]

    def moved(time: int) -> int:
        place = bisect_left(times, time)
        if place in (0, len(times)):
            return time + (readings[min(place, len(times) - 1)][1] if times else 0)
        (before, gain, _), (after, next_gain, _) = readings[place - 1 : place + 1]
        return time + gain + round((next_gain - gain) * (time - before) / (after - before))

    return moved


def _parts(rank: int, file: RankFile | None, steps: list[int]) -> list[RankTrace]:
    """The traces of some steps of a rank; a rank without any has an empty one."""
    found = [] if file is None else [file.steps[step] for step in steps if step in file.steps]
    if file is None or not found:
        return [RankTrace(rank, is_partial=True)]
    rest = [step for step in sorted(file.steps) if step >= steps[0]]
    is_dense = rest == list(range(steps[0], steps[0] + len(rest)))
    is_whole = file.is_whole and is_dense and not any(file.steps[step].is_partial for step in rest)
    return [replace(part, is_partial=not is_whole) for part in found]


def _listed(steps: Sequence[int]) -> str:
    if not steps:
        return "no steps"
    if len(steps) == 1:
        return f"step {steps[0]}"
    is_dense = len(steps) == steps[-1] - steps[0] + 1
    return f"steps {steps[0]} to {steps[-1]}" + ("" if is_dense else f", {len(steps)} of them")
