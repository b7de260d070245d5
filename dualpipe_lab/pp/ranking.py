"""Ranking: compares schedules under equal costs and rules.

Chapter: book/pp/explorer.  In: programs of one size, costs, a memory limit.  Out: one `Score` each, the best first.
Costs are those of one rank's share, 1/p, of the model.  For a schedule with v * p stages, each stage has 1/v of these
costs, of the activations and of the weights.
One rule on overlapped pairs holds for all: with `pairs=False` a pair takes the time of its F and then its B, whatever
`cost.overlap` is; with `pairs=True` compare twins, see `dualpipe_lab.pp.schedules.names`.
"""

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from dualpipe_lab.pp.cost import UNIT_COST, Cost
from dualpipe_lab.pp.program import Overlap, Program
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.timeline import Time, Timeline

_WORK = ("F", "I", "W", "B", "overlap")


class Score(NamedTuple):
    """The numbers of one schedule; all sizes in units of 1/p of the model.

    `bubble`: idle time over makespan, of all ranks.  `window`: the most ticks between a rank's first start and last
    end. For the schedules of the registry this is the time of a step that is followed by another without a barrier (for
    any program see `dualpipe_lab.pp.repeat.step_time`).  `local_bubble`: the most idle ticks of a rank in its window.
    `peak`: the most activations that a rank holds.  `weights`: the most weights that a rank stores: 2 are two copies of
    its share.  `pairs`: the number of overlapped pairs, of all ranks.
    """

    name: str
    makespan: Time
    bubble: float
    window: Time
    local_bubble: Time
    peak: Time
    messages: int
    weights: Time
    pairs: int

    def fits(self, memory: Time | None) -> bool:
        """Whether the activations stay within a limit; None is no limit."""
        return memory is None or self.peak <= memory


def share(program: Program) -> Time:
    """Return the size of a stage in units of 1/p of the model: 1 for p stages, 1/2 for 2p."""
    return _plain(Fraction(program.num_ranks, program.num_stages))


def stage_cost(program: Program, cost: Cost) -> Cost:
    """Return the costs of one stage, given those of a rank's share of the model.

    Raises ValueError for costs that differ between stages.

    >>> program = Program.parse("two stages a rank", ["0F0 1F0 1B0 0B0"])
    >>> stage_cost(program, Cost(F=2, latency=1)).F
    1
    """
    size = share(program)
    if size == 1:
        return cost
    work: dict[str, Any] = {name: getattr(cost, name) for name in _WORK}
    for name, value in work.items():
        if not isinstance(value, int | Fraction | None):
            raise ValueError(f"costs of a rank's share are one number each, Cost.{name} is not; use simulate instead")
        work[name] = None if value is None else _plain(value * size)
    return Cost(**work, latency=cost.latency, transfer=cost.transfer)


def score(program: Program, cost: Cost = UNIT_COST, pairs: bool = True) -> Score:
    """Return the numbers of one program; `cost` is that of a rank's share of the model.

    `pairs`: whether a pair takes `cost.overlap`; otherwise a pair takes the time of F and then B.

    >>> from dualpipe_lab.pp.schedules import one_f_one_b, paired_one_f_one_b
    >>> score(one_f_one_b(4, 8))[1:]
    (33, 0.2727272727272727, 33, 9, 4, 48, 1, 0)
    >>> [score(paired_one_f_one_b(4, 8), Cost(overlap=2), pairs).makespan for pairs in (True, False)]
    [26, 33]
    """
    timeline = simulate(program, stage_cost(program, cost if pairs else replace(cost, overlap=None)))
    ranks, size = range(timeline.num_ranks), share(program)
    stages = [{*program.stages_of(rank)} for rank in ranks]
    return Score(
        program.name,
        _plain(timeline.makespan),
        timeline.bubble_fraction,
        _plain(max(last - first for first, last in map(timeline.window, ranks))),
        _plain(local_bubble(timeline)),
        _plain(size * max(map(timeline.peak_activations, ranks))),
        len(timeline.messages),
        _plain(size * max(map(len, stages))),
        sum(isinstance(step, Overlap) for steps in program.ranks for step in steps),
    )


def local_bubble(timeline: Timeline) -> Time:
    """Return the longest idle time of a rank between its first and its last action: the zero-bubble papers' bubble."""
    return max(map(timeline.local_bubble, range(timeline.num_ranks)))


def ranked(scores: Iterable[Score], memory: Time | None = None, barrier: bool = True) -> list[Score]:
    """Return the scores in order: within the memory limit first, then by time, memory and messages.

    `barrier`: whether all ranks wait for each other after a step, as for a norm of all gradients.  The time is then the
    makespan, otherwise the window.
    """
    return sorted(
        scores,
        key=lambda one: (not one.fits(memory), one.makespan if barrier else one.window, one.peak, one.messages),
    )


def _plain(value: Time) -> Time:
    exact = Fraction(value)
    return exact.numerator if exact.denominator == 1 else exact
