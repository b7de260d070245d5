"""DualPipe and DualPipeV: forwards of one flow of microbatches overlap with backwards of the other.

Chapters: book/pp/dualpipe, book/pp/dualpipev.  In: P ranks, M microbatches.  Out: one list of steps per rank.
DualPipe needs twice the weights of 1F1B; DualPipeV is DualPipe on half of its ranks, and has every stage once.
Closed forms need equal stages, free links, t_B = t_I + t_W, and pairs at least as long as their longer half.  They hold
for any such costs: found and checked with the simulator, not proved.
Elsewhere: DeepSeek's DualPipe and DualPipeV and torch ScheduleDualPipeV, the same order action by action; torch cannot
place a stage on two ranks.
Sources: DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.1, figure 5 (P = 8, M = 20); the numbering of the steps and
the published idle time: DeepSeek-AI 2025, github.com/deepseek-ai/DualPipe; two directions: Li and Hoefler 2021, Chimera
(arXiv 2107.06925), section 3; the cut in half: Qi et al. 2025, Sea AI Lab, "DualPipe could be better without the Dual".
"""

from collections import deque
from typing import NamedTuple

from dualpipe_lab.pp.cost import UNIT_COST, Cost, StageTicks, stage_ticks
from dualpipe_lab.pp.program import Action, B, F, I, Overlap, Program, ProgramStep, W, check_counts
from dualpipe_lab.pp.schedules.easy_dualpipe import check_even_microbatches, check_even_ranks
from dualpipe_lab.pp.schedules.flush import num_messages
from dualpipe_lab.pp.schedules.schedule import Schedule
from dualpipe_lab.timeline import Time


def dualpipe(num_ranks: int, num_microbatches: int) -> Program:
    """Build the DualPipe program; microbatches M/2 to M-1 travel from the last rank to the first.

    Every rank holds two stages, its own and its mirror's; the mirrors' gradients must be summed before the update.
    Raises ValueError for an odd number of ranks or of microbatches, and for fewer microbatches than two per rank.

    >>> print(" ".join(map(str, dualpipe(2, 4).ranks[0])))
    0F0 1F2 0F1 1B2 (1F3;0B0)OVERLAP_F_B 1B3 0I1 0W1
    """
    check_dualpipe(num_ranks, num_microbatches)
    half = num_microbatches // 2
    ranks = []
    for rank in range(num_ranks):
        mirror = num_ranks - 1 - rank
        downwards, upwards = Flow(rank, 0), Flow(mirror, half)
        # A rank's flow 0 is the one whose end is nearer, so both halves of the ranks do the same, mirrored.
        flows = (downwards, upwards) if rank < mirror else (upwards, downwards)
        ranks.append(steps_of(flows, min(rank, mirror), num_ranks // 2, half))
    return Program("DualPipe", ranks, num_stages=num_ranks, num_microbatches=num_microbatches, num_directions=2)


def dualpipev(num_ranks: int, num_microbatches: int) -> Program:
    """Build the DualPipeV program; raises ValueError for fewer than two microbatches per rank.

    The 2P half-size stages form a V: a microbatch passes the ranks downwards, then upwards.  The upward ones take the
    place of DualPipe's other direction: this program is the first P ranks of `dualpipe(2 * P, 2 * M)`.

    >>> print(" ".join(map(str, dualpipev(1, 2).ranks[0])))
    0F0 1F0 0F1 1B0 (1F1;0B0)OVERLAP_F_B 1B1 0I1 0W1
    """
    check_dualpipev(num_ranks, num_microbatches)
    last = 2 * num_ranks - 1
    ranks = [
        steps_of((Flow(rank, 0), Flow(last - rank, 0)), rank, num_ranks, num_microbatches) for rank in range(num_ranks)
    ]
    return Program("DualPipeV", ranks, num_stages=last + 1, num_microbatches=num_microbatches, num_directions=1)


class Flow(NamedTuple):
    """The microbatches that reach a rank from one side, and the stage that runs them there."""

    stage: int
    first_microbatch: int


def eight_steps(position: int, num_positions: int, num_microbatches: int) -> list[list[str]]:
    """Return the eight steps of one rank, each a list of words such as F0, I1, W and F1&B0.

    Two flows of `num_microbatches` each, at least 2 * `num_positions`, cross the `num_positions` ranks from the outside
    to the middle: flow 0 comes from the outside, position 0, and flow 1 from the middle.  The words name work by flow:
    F0 is the next forward of flow 0, F1&B0 an overlapped pair, W the oldest pending weight gradient of either flow.
    All counts follow from the rank's distance to either end.

    >>> for number, words in enumerate(eight_steps(position=0, num_positions=2, num_microbatches=4), start=1):
    ...     print(number, *words)
    1 F0 F0
    2 F0 F1
    3 I1 W F1
    4 F0&B1 F1&B0
    5 B1 F1&B0
    6 B1 I0
    7 W I0
    8 W
    """
    inside = num_positions - position - 1  # the ranks between this one and the middle
    outside = position + 1  # this rank and those between it and the end
    steady = num_microbatches - 2 * num_positions + outside
    # The middle rank has had no time to prepare a backward: it makes its first pair's halves one after the other.
    first_pair = ["F0&B1"] if inside else ["F0", "B1"]
    return [
        ["F0"] * 2 * inside,
        ["F0", "F1"] * outside,
        ["I1", "W", "F1"] * inside,
        [*first_pair, "F1&B0", *["F0&B1", "F1&B0"] * (steady - 1)],
        ["B1", "F1&B0"] * inside,
        (["B1", "B0"] * outside)[:outside] + (["I1", "I0"] * outside)[outside:],
        ["W", "I0"] * inside,
        ["W"] * outside,
    ]


def steps_of(flows: tuple[Flow, Flow], position: int, num_positions: int, num_microbatches: int) -> list[ProgramStep]:
    """Return the eight steps as actions on stages and microbatches, numbered in the order of each flow."""
    done = {F: [0, 0], B: [0, 0]}
    waiting: deque[Action] = deque()  # weight gradients that an I has left

    def action(word: str) -> Action:
        if word == W:
            return waiting.popleft()
        kind, flow = word[0], int(word[1])
        count, (stage, first) = done[F if kind == F else B], flows[flow]
        named = Action(stage, kind, first + count[flow])
        count[flow] += 1
        if kind == I:
            waiting.append(named._replace(kind=W))
        return named

    words = (word for number in eight_steps(position, num_positions, num_microbatches) for word in number)
    return [Overlap(*map(action, word.split("&"))) if "&" in word else action(word) for word in words]


def check_dualpipe(num_ranks: int, num_microbatches: int) -> None:
    """Raise ValueError for sizes that DualPipe cannot have."""
    check_counts("dualpipe", num_ranks=num_ranks, num_microbatches=num_microbatches)
    check_even_ranks("dualpipe", num_ranks, instead="dualpipev or ")
    if num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"dualpipe needs at least two microbatches per rank, got {num_microbatches} for {num_ranks} ranks; "
            f"use easy_dualpipe or {2 * num_ranks} microbatches or more"
        )
    check_even_microbatches("dualpipe", num_microbatches)


def check_dualpipev(num_ranks: int, num_microbatches: int) -> None:
    """Raise ValueError for sizes that DualPipeV cannot have."""
    check_counts("dualpipev", num_ranks=num_ranks, num_microbatches=num_microbatches)
    if num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"dualpipev needs at least two microbatches per rank, got {num_microbatches} for {num_ranks} ranks; "
            f"use {2 * num_ranks} microbatches or more, or a schedule such as 1f1b"
        )


def dualpipe_makespan(num_ranks: int, num_microbatches: int, cost: Cost = UNIT_COST) -> Time:
    """Return DualPipe's makespan; ValueError for unequal stages, slow links, and pairs shorter than F or B.

    >>> dualpipe_makespan(8, 20), dualpipe_makespan(8, 20, Cost(F=2, I=2, W=2, overlap=5))
    (66, 118)
    """
    check_dualpipe(num_ranks, num_microbatches)
    return _makespan(num_ranks // 2, num_microbatches // 2, _ticks(num_ranks, cost))


def dualpipev_makespan(num_ranks: int, num_microbatches: int, cost: Cost = UNIT_COST) -> Time:
    """Return DualPipeV's makespan, for costs of a half-size stage; ValueError as `dualpipe_makespan`.

    >>> dualpipev_makespan(4, 10)
    66
    """
    check_dualpipev(num_ranks, num_microbatches)
    return _makespan(num_ranks, num_microbatches, _ticks(2 * num_ranks, cost))


def dualpipe_bubble(num_ranks: int, num_microbatches: int, rank: int, cost: Cost = UNIT_COST) -> Time:
    """Return the idle time of a rank of DualPipe; ValueError as `dualpipe_makespan`.

    >>> [dualpipe_bubble(8, 20, rank, Cost(overlap=2)) for rank in range(8)]
    [1, 2, 3, 3, 3, 3, 2, 1]
    """
    check_dualpipe(num_ranks, num_microbatches)
    half, per_flow, ticks = num_ranks // 2, num_microbatches // 2, _ticks(num_ranks, cost)
    return _makespan(half, per_flow, ticks) - _busy(half, per_flow, min(rank, num_ranks - 1 - rank), ticks)


def dualpipe_peak_activations(num_ranks: int) -> int:
    """Return the most activations that every rank of DualPipe holds.

    >>> dualpipe_peak_activations(8)
    9
    """
    return num_ranks + 1


def dualpipev_peak_activations(num_ranks: int) -> int:
    """Return the most activations, of half-size stages, that every rank of DualPipeV holds.

    >>> dualpipev_peak_activations(4)
    9
    """
    return 2 * num_ranks + 1


def dualpipev_num_messages(num_ranks: int, num_microbatches: int) -> int:
    """Return DualPipeV's number of messages: activations and gradients pass every link twice.

    DualPipe and Easy-DualPipe have 1F1B's number, `num_messages`.

    >>> dualpipev_num_messages(4, 10)
    120
    """
    return 4 * (num_ranks - 1) * num_microbatches


def _ticks(num_stages: int, cost: Cost) -> StageTicks:
    ticks = stage_ticks("DualPipe", num_stages, cost)
    if ticks.B != ticks.I + ticks.W:
        raise ValueError(
            f"DualPipe's closed forms need B = I + W, got B={ticks.B}, I={ticks.I}, W={ticks.W}; leave B out"
        )
    if ticks.pair < max(ticks.F, ticks.B):
        raise ValueError(
            f"DualPipe's closed forms need a pair to last as long as its longer half, got overlap={ticks.pair} "
            f"for F={ticks.F} and B={ticks.B}; use {max(ticks.F, ticks.B)} or more, or simulate()"
        )
    return ticks


def _makespan(half: int, per_flow: int, t: StageTicks) -> Time:
    """The idle time of a rank in the middle and its work; H = `half` ranks lie between an end and the middle.

    That idle time is (H - 1) * (t_F + (t_F&B - t_B) + max(t_I - t_W, 0)) + max(0, (H - 1)(t_I - t_F) - t_F).  Its terms
    are the fill; step 5, where a B waits for a longer pair of the neighbour; step 7, where W hides a part of the wait
    for the next I; and step 3 if I is slow.  Published is (H - 1) * (t_F&B + t_B - 3 t_W): the same where
    t_F = t_I >= t_W.
    """
    inside = half - 1
    idle = inside * (t.F + (t.pair - t.B) + max(t.I - t.W, 0)) + max(0, inside * (t.I - t.F) - t.F)
    return idle + _busy(half, per_flow, inside, t)


def _busy(half: int, per_flow: int, position: int, t: StageTicks) -> Time:
    """Outer ranks have fewer pairs, so they are busy for longer if a pair has a gain, t_F&B < t_F + t_B."""
    in_the_middle = position == half - 1  # its first pair runs one half after the other
    num_pairs = 2 * per_flow - 3 * half + position + 1 - in_the_middle
    return 2 * per_flow * (t.F + t.B) - num_pairs * (t.F + t.B - t.pair)


SCHEDULES = (
    Schedule("dualpipe", dualpipe, dualpipe_makespan, dualpipe_peak_activations, num_messages),
    Schedule("dualpipev", dualpipev, dualpipev_makespan, dualpipev_peak_activations, dualpipev_num_messages),
)
