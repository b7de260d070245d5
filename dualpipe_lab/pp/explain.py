"""`explain`: tells in words which input each rank waits for.

Chapter: book/pp/one-f-one-b.  In: a `Program` and a `Cost`.  Out: an `Explanation`, which prints itself.
  warm-up     a rank waits for its first input
  in between  a rank waits for an activation or a gradient from another rank
  cool-down   a rank has run all its actions and waits for the last rank to end
The waits of a rank add up to its `bubble_time`.  Waits for the same kind of input from the same rank are told together.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from dualpipe_lab.pp.cost import UNIT_COST, Cost
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.validation.rules import InvalidProgram
from dualpipe_lab.timeline import Message, Span, Time, Timeline
from dualpipe_lab.timeline.spans import feeds
from dualpipe_lab.timeline.units import number

PHASES = WARMUP, BETWEEN, COOLDOWN = "warm-up", "in between", "cool-down"
MOST_RANKS, MOST_LONGEST = 16, 3


class Pause(NamedTuple):
    """One wait of one rank, from `start` to `end`."""

    rank: int
    start: Time
    end: Time
    phase: str
    beside: str  # the label of the action (or pair) after the wait; in cool-down, of the action before it
    what: str = ""  # "activation" or "gradient"
    needed: str = ""  # the action that makes it
    source: int = -1  # the rank of that action
    on_link: Time = 0  # the part of the wait during which the message was on its link

    @property
    def ticks(self) -> Time:
        """The length of the wait."""
        return self.end - self.start

    def __str__(self) -> str:
        return f"rank {self.rank} waits {self.words()}"

    def words(self) -> str:
        """Return the length and the cause of the wait as text, without the rank."""
        if self.phase == COOLDOWN:
            return f"{_ticks(self.ticks)} after {self.beside} for the last rank to end"
        cause = f"for the {self.what} of {self.needed} from rank {self.source}"
        return f"{_ticks(self.ticks)} before {self.beside} {cause}{_on_link(self.on_link)}"


@dataclass(frozen=True, repr=False)
class Explanation:
    """Every wait of every rank of a program, or the problems of a program that cannot run; `print` shows the text."""

    name: str  # of the program
    timeline: Timeline | None  # the simulated run; None for a program that cannot run
    pauses: tuple[Pause, ...] = ()  # every wait, rank by rank, in order of time
    problems: tuple[str, ...] = ()  # that `validate` finds; none for a valid program

    def of_rank(self, rank: int) -> str:
        """Return one rank's waits as text; ValueError if the program cannot run."""
        if self.timeline is None:
            raise ValueError(f"{self.name} cannot run, so no rank waits for another; see problems")
        groups: defaultdict[tuple[str, str, int], list[Pause]] = defaultdict(list)
        for pause in self.pauses:
            if pause.rank == rank:
                groups[pause.phase, pause.what, pause.source].append(pause)
        work, idle = self.timeline.busy_time(rank), self.timeline.bubble_time(rank)
        head = f"rank {rank} works {_ticks(work)} and waits {number(idle)}"
        lines = [f"  {phase + ':':11} {_together(pauses)}" for (phase, _, _), pauses in groups.items()]
        return "\n".join([head, *lines])

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        if self.timeline is None:
            yield f"{self.name} cannot run:"
            yield from (f"  - {problem}" for problem in self.problems)
            return
        ranks, total = range(self.timeline.num_ranks), self.timeline.makespan
        idle = f"{number(self._total(*PHASES))} of {number(len(ranks) * total)}, {self.timeline.bubble_fraction:.1%}"
        yield f"{self.name}: {len(ranks)} ranks, {_ticks(total)}; idle {idle}"
        yield "  " + ", ".join(f"{phase} {number(self._total(phase))}" for phase in PHASES)
        yield from map(self.of_rank, ranks[:MOST_RANKS])
        if len(ranks) > MOST_RANKS:
            yield f"and {len(ranks) - MOST_RANKS} more ranks, told by of_rank({MOST_RANKS}) and so on"
        if between := [pause for pause in self.pauses if pause.phase == BETWEEN]:
            yield "the longest waits in between:"
            yield from (f"  {pause}" for pause in sorted(between, key=lambda pause: -pause.ticks)[:MOST_LONGEST])

    def _total(self, *phases: str) -> Time:
        return sum(pause.ticks for pause in self.pauses if pause.phase in phases)


def explain(program: Program, cost: Cost = UNIT_COST) -> Explanation:
    """Return the waits of each rank of a program, or the problems of a program that cannot run.

    >>> from dualpipe_lab.pp.schedules import one_f_one_b
    >>> print(explain(one_f_one_b(2, 2)))
    1F1B: 2 ranks, 9 ticks; idle 6 of 18, 33.3%
      warm-up 1, in between 3, cool-down 2
    rank 0 works 6 ticks and waits 3
      in between: 3 ticks for gradients from rank 1 in 2 waits, longest 2 before 0B0
    rank 1 works 6 ticks and waits 3
      warm-up:    1 tick before 1F0 for the activation of 0F0 from rank 0
      cool-down:  2 ticks after 1B1 for the last rank to end
    the longest waits in between:
      rank 0 waits 2 ticks before 0B0 for the gradient of 1B0 from rank 1
      rank 0 waits 1 tick before 0B1 for the gradient of 1B1 from rank 1
    """
    try:
        timeline = simulate(program, cost)
    except InvalidProgram as error:
        return Explanation(program.name, None, problems=error.problems)
    messages = {(message.dst, message.label): message for message in timeline.messages}
    ranks = enumerate(timeline.spans_by_rank)
    pauses = [pause for rank, spans in ranks for pause in _pauses(rank, spans, timeline.makespan, messages)]
    return Explanation(program.name, timeline, tuple(pauses))


def _pauses(
    rank: int, spans: Sequence[Span], makespan: Time, messages: dict[tuple[int, str], Message]
) -> Iterator[Pause]:
    now: Time = 0
    for index, span in enumerate(spans):
        if span.start > now:
            last = _last_message(span, messages)
            what = "activation" if last.label == _forward_feed(span) else "gradient"
            on_link = span.start - max(now, last.sent)
            phase = BETWEEN if index else WARMUP
            yield Pause(rank, now, span.start, phase, span.label, what, last.label, last.src, on_link)
        now = span.end
    if now < makespan:
        yield Pause(rank, now, makespan, COOLDOWN, spans[-1].label)


def _last_message(span: Span, messages: dict[tuple[int, str], Message]) -> Message:
    keys = [(span.rank, label) for part in span.actions for label in feeds(part)]
    return max((messages[key] for key in keys if key in messages), key=attrgetter("arrived"))


def _forward_feed(span: Span) -> str:
    return next((label for part in span.actions if part[1] == "F" for label in feeds(part)), "")


def _together(pauses: Sequence[Pause]) -> str:
    longest = max(pauses, key=lambda pause: pause.ticks)
    if len(pauses) == 1:
        return longest.words()
    total, on_link = sum(pause.ticks for pause in pauses), sum(pause.on_link for pause in pauses)
    source = f"for {'activations' if longest.what == 'activation' else 'gradients'} from rank {longest.source}"
    most = f"longest {number(longest.ticks)} before {longest.beside}"
    return f"{_ticks(total)} {source} in {len(pauses)} waits, {most}{_on_link(on_link)}"


def _on_link(ticks: Time) -> str:
    return f" ({number(ticks)} on the link)" if ticks else ""


def _ticks(time: Time) -> str:
    return f"{number(time)} tick{'' if time == 1 else 's'}"
