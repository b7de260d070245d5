"""`read_traces`: the trace files of one run, from all hosts, as one timeline per step or of all of them.

Chapter: book/appendix/gpus.  In: a folder with a file per rank.  Out: a `Timeline`; what was matched, lost, truncated.
  clock        between two readings the correction is a straight line, and its error at most the larger bound
  truncated    a message of which one end was not recorded: at the edge of a window, in a rank that was ended, in a
               file that is not here
  lost         sent in a step behind which the receiver recorded all others to its end, and never received
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dualpipe_lab.launch.record.trace import Matching, RankTrace, clock_note, match, to_timeline
from dualpipe_lab.launch.record.trace_format import FORMAT, unpack_step
from dualpipe_lab.timeline import COMMUNICATION, Timeline


@dataclass
class RankFile:
    """What the file of one rank holds.

    Attributes:
        head: rank, world_size, host, pid, every, length.
        steps: the trace of each recorded step, by its number, on rank 0's clock.
        is_whole: the rank closed the file; False for a run that was ended.
        readings: time, gain and bound of each reading of the clock.
    """

    head: dict[str, Any]
    steps: dict[int, RankTrace] = field(default_factory=dict)
    is_whole: bool = False
    readings: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """Number of the rank."""
        return int(self.head["rank"])


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
        """Match the messages of some steps (default: of all)."""
        return match([part for row in self._rows(steps) for part in row])

    def timeline(self, steps: Sequence[int] | None = None) -> Timeline:
        """Return the timeline of some steps (default: of all), from its first event on.

        The collectives of each rank are a stream of their own.

        Raises:
            ValueError: a step that no rank recorded.
        """
        rows = self._rows(steps)
        name = f"{self.path.name}, {_listed(self.steps if steps is None else sorted(steps))}"
        messages = match([part for row in rows for part in row]).messages
        joined = [
            RankTrace(rank, [span for part in row for span in part.spans], error_ns=row[0].error_ns)
            for rank, row in enumerate(rows)
        ]
        collectives = [[span for part in row for span in part.collectives] for row in rows]
        whole = to_timeline(joined, messages, "wall", name)
        if any(collectives):
            whole = whole.with_stream(COMMUNICATION, collectives)
        ends = [time for spans in whole.spans_by_rank for span in spans for time in (span.start, span.end)]
        return whole.between(min(ends), max(ends) + 1) if ends else whole

    def __str__(self) -> str:
        found = self.matching()
        hosts = sorted({str(file.head["host"]) for file in self.files.values()})
        lines = [
            f"{self.path}: {len(self.files)} of {self.world_size} ranks on {len(hosts)} host"
            f"{'s' * (len(hosts) > 1)} ({', '.join(hosts)}), {_listed(self.steps)}",
            f"messages: {len(found.messages)} matched, {len(found.lost)} lost, {found.truncated} with one end that was "
            "not recorded",
            f"clocks: {self._clocks()}",
        ]
        if self.missing:
            lines.append(f"no file of ranks {', '.join(map(str, self.missing))}")
        if ended := [rank for rank, file in self.files.items() if not file.is_whole]:
            lines.append(f"ended without closing their files: ranks {', '.join(map(str, ended))}")
        return "\n".join(lines + found.lost[:5])

    def _clocks(self) -> str:
        note = clock_note([row[0] for row in self._rows(None)]).removeprefix(", clocks ")
        return note or "one for all ranks"

    def _rows(self, steps: Sequence[int] | None) -> list[list[RankTrace]]:
        """The traces of some steps, by rank."""
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
    by_rank = {file.rank: file for file in files}
    return Traces(path, by_rank, tuple(rank for rank in range(sizes.pop()) if rank not in by_rank))


def _read(path: Path) -> RankFile:
    lines = path.read_text(encoding="utf-8").split("\n")
    values = [json.loads(line) for line in lines[:-1]]  # a line that a dying rank has begun has no end
    if not values or values[0].get("format") != FORMAT:
        raise ValueError(f"{path} does not begin with the format {FORMAT!r}; it is no trace of a rank")
    file = RankFile(values[0])
    for line in values[1:]:
        if "step" in line:
            file.steps[line["step"]] = unpack_step(file.rank, line)
        elif "clock" in line:
            time, gained, bound = line["clock"]
            file.readings.append((time, gained, bound))
    file.is_whole = "end" in values[-1]
    for trace in file.steps.values():
        _correct(trace, file.readings)
    return file


def _correct(trace: RankTrace, readings: list[tuple[int, int, int]]) -> None:
    """Put a step's times on rank 0's clock; behind the last reading the offset is taken to stay."""
    moved = _line(readings)
    for spans in (trace.spans, trace.collectives):
        spans[:] = [span._replace(start=moved(int(span.start)), end=moved(int(span.end))) for span in spans]
    trace.sent[:] = [
        sent._replace(time_ns=moved(sent.time_ns), left_ns=None if sent.left_ns is None else moved(sent.left_ns))
        for sent in trace.sent
    ]
    trace.received[:] = [one._replace(time_ns=moved(one.time_ns)) for one in trace.received]
    trace.error_ns = max((bound for _, _, bound in readings), default=0)


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
    is_partial = not _has_all_behind(file, steps[0])
    return [replace(part, is_partial=is_partial) for part in found]


def _has_all_behind(file: RankFile, first: int) -> bool:
    """Whether a rank recorded every step from one on, to the end of its file."""
    rest = [step for step in sorted(file.steps) if step >= first]
    is_dense = rest == list(range(first, first + len(rest)))
    return file.is_whole and is_dense and not any(file.steps[step].is_partial for step in rest)


def _listed(steps: Sequence[int]) -> str:
    if not steps:
        return "no steps"
    if len(steps) == 1:
        return f"step {steps[0]}"
    is_dense = len(steps) == steps[-1] - steps[0] + 1
    return f"steps {steps[0]} to {steps[-1]}" + ("" if is_dense else f", {len(steps)} of them")
