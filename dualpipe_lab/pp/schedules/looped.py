"""Interleaved 1F1B and looped breadth-first: every rank holds V small stages on a loop of ranks.

Chapter: book/pp/interleaved.  In: P ranks, M microbatches, V stages per rank; stage s on rank s % P.
Out: one list of actions per rank.  Times per stage, which is 1/V of a rank's share of the model.
Elsewhere: torch ScheduleInterleaved1F1B (the same order wherever torch is legal) and ScheduleLoopedBFS; Megatron
forward_backward_pipelining_with_interleaving.
Sources: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2; Lamy-Poirier 2023 (arXiv 2211.05953).
"""

from collections import deque
from collections.abc import Sequence

from dualpipe_lab.pp.cost import UNIT_COST, Cost, stage_ticks
from dualpipe_lab.pp.program import Action, B, Cell, F, I, Overlap, Program, ProgramStep, W, check_counts
from dualpipe_lab.pp.schedules.schedule import Schedule
from dualpipe_lab.timeline import Time


def warmup_steady_cooldown(
    forwards: Sequence[Cell],
    backwards: Sequence[Cell],
    num_warmup: int,
    weight_delay: int | None = None,
    pairs: bool = False,
) -> list[ProgramStep]:
    """Return one rank's steps: warm-up forwards, alternating forwards and backwards, cool-down backwards.

    1F1B and its descendants differ in four choices only: the two orders, the depth of the warm-up, the delay of a
    weight gradient, and whether forward and backward overlap.  Cells are (stage, microbatch).  A rank holds num_warmup
    + 1 activations, plus `weight_delay` where the backward is split; at most the number of forwards.

    `num_warmup`: the number of forwards before the first backward.  `weight_delay`: None for full backwards (B);
    otherwise the backwards are split, and each W follows its I after `weight_delay` further I.  `pairs`: a forward and
    the full backward after it are one overlapped pair, except for the first `weight_delay` backwards and those without
    a forward.

    >>> cells = [(0, 0), (0, 1), (0, 2)]
    >>> " ".join(map(str, warmup_steady_cooldown(cells, cells, num_warmup=1, weight_delay=1)))
    '0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2'
    >>> " ".join(map(str, warmup_steady_cooldown(cells, cells, num_warmup=1, pairs=True)))
    '0F0 (0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B 0B2'
    """
    num_warmup = min(num_warmup, len(forwards))
    steps: list[ProgramStep] = [Action(stage, F, m) for stage, m in forwards[:num_warmup]]
    waiting: deque[Action] = deque()  # weight gradients that an I has left
    for index, (stage, m) in enumerate(backwards):
        forward = [Action(later, F, n) for later, n in forwards[num_warmup + index :][:1]]
        if pairs and forward and index >= (weight_delay or 0):
            steps.append(Overlap(forward[0], Action(stage, B, m)))
            continue
        steps += forward
        if weight_delay is None:
            steps.append(Action(stage, B, m))
            continue
        steps.append(Action(stage, I, m))
        waiting.append(Action(stage, W, m))
        if len(waiting) > weight_delay:
            steps.append(waiting.popleft())
    return [*steps, *waiting]


def interleaved(
    num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2, round_size: int | None = None
) -> Program:
    """Build the interleaved 1F1B program for any number of ranks, microbatches and virtual stages.

    A round of microbatches passes all stages of a rank before the next round starts: depth first.  Larger rounds hold
    more activations and leave messages more time; a single round is breadth first until the last stage.

    `round_size`: the least number of microbatches in a round, at least and by default `num_ranks`; fewer microbatches
    are one round.  Raises ValueError for a smaller `round_size`.

    >>> print(interleaved(2, 2))
    # Interleaved 1F1B: 2 ranks, 4 stages, 2 microbatches
    rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    check_loop("interleaved", num_ranks, num_microbatches, num_virtual_stages)
    sizes = round_sizes(num_ranks, num_microbatches, round_size)
    ranks = []
    for rank in range(num_ranks):
        # Two forwards per rank below, where 1F1B has one, leave messages time to travel.  So V = 1 is not 1F1B: its
        # makespan is the same, its activations are up to 2 * P - 1.
        num_warmup = (num_virtual_stages - 1) * sizes[0] + 2 * (num_ranks - 1 - rank)
        ranks.append(warmup_steady_cooldown(*loop_cells(rank, num_ranks, sizes, num_virtual_stages), num_warmup))
    return Program("Interleaved 1F1B", ranks, num_virtual_stages * num_ranks, num_microbatches, num_directions=1)


def check_loop(builder: str, p: int, m: int, v: int) -> None:
    """Raise ValueError unless the numbers of ranks, microbatches and virtual stages are integers of at least 1."""
    check_counts(builder, num_ranks=p, num_microbatches=m, num_virtual_stages=v)


def loop_cells(
    rank: int, num_ranks: int, round_sizes: Sequence[int], num_virtual_stages: int
) -> tuple[list[Cell], list[Cell]]:
    """Return the (stage, microbatch) pairs of one rank on a loop, in the order of forwards and of backwards.

    >>> loop_cells(1, num_ranks=2, round_sizes=[2], num_virtual_stages=2)
    ([(1, 0), (1, 1), (3, 0), (3, 1)], [(3, 0), (3, 1), (1, 0), (1, 1)])
    """
    stages = range(rank, num_virtual_stages * num_ranks, num_ranks)
    forwards: list[Cell] = []
    backwards: list[Cell] = []
    done = 0
    for size in round_sizes:
        microbatches = range(done, done + size)
        forwards += [(stage, m) for stage in stages for m in microbatches]
        backwards += [(stage, m) for stage in reversed(stages) for m in microbatches]
        done += size
    return forwards, backwards


def round_sizes(num_ranks: int, num_microbatches: int, round_size: int | None = None) -> list[int]:
    """Return the number of microbatches of each round: at least `round_size`, unless there are fewer in all.

    >>> round_sizes(4, 11), round_sizes(4, 3), round_sizes(4, 20, round_size=7)
    ([6, 5], [3], [10, 10])
    """
    least = num_ranks if round_size is None else round_size
    check_counts("interleaved", round_size=least)
    if least < num_ranks:
        raise ValueError(
            f"interleaved needs round_size to be at least the number of ranks, {num_ranks}, got {least}: a smaller "
            f"round waits for itself to come around the loop; use round_size={num_ranks} or more"
        )
    # A round of fewer than P microbatches would wait for its first microbatch to return on the loop.  Rounds differ in
    # size, so that any M is legal; torch needs a multiple of the number of rounds.
    num_rounds = max(1, num_microbatches // least)
    size, larger = divmod(num_microbatches, num_rounds)
    return [size + 1] * larger + [size] * (num_rounds - larger)


def looped_bfs(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2) -> Program:
    """Build the breadth-first program for any number of ranks, microbatches and virtual stages.

    A rank runs all microbatches of a stage before the next stage, in 2 * V - 1 blocks: with sharded weights, each block
    gathers them once.  V = 1 is GPipe.

    >>> print(looped_bfs(2, 2))
    # Looped BFS: 2 ranks, 4 stages, 2 microbatches
    rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    rank 1: 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """
    check_loop("looped_bfs", num_ranks, num_microbatches, num_virtual_stages)
    num_stages = num_virtual_stages * num_ranks
    ranks = []
    for rank in range(num_ranks):
        stages = range(rank, num_stages, num_ranks)
        work = [(stage, F) for stage in stages] + [(stage, B) for stage in reversed(stages)]
        # Backwards run first in, first out (torch: last in, first out): gradients are summed in the order of the
        # microbatches and equal those of one process to the last bit.
        ranks.append([Action(stage, kind, m) for stage, kind in work for m in range(num_microbatches)])
    return Program("Looped BFS", ranks, num_stages, num_microbatches, num_directions=1)


def interleaved_makespan(
    num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2, cost: Cost = UNIT_COST
) -> Time:
    """Return interleaved 1F1B's makespan for equal stages and free links; ValueError for other costs.

    With free links, the size of the rounds makes no difference.

    >>> interleaved_makespan(4, 8, num_virtual_stages=2)
    57
    """
    return _loop_makespan("interleaved", num_ranks, num_microbatches, num_virtual_stages, cost)


def looped_bfs_makespan(
    num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2, cost: Cost = UNIT_COST
) -> Time:
    """Return the makespan of looped breadth-first for equal stages and free links; ValueError for other costs.

    >>> looped_bfs_makespan(4, 8, num_virtual_stages=2)
    57
    """
    return _loop_makespan("looped_bfs", num_ranks, num_microbatches, num_virtual_stages, cost)


def interleaved_peak_activations(
    num_ranks: int, num_microbatches: int, rank: int, num_virtual_stages: int = 2, round_size: int | None = None
) -> int:
    """Return the most stages' activations that one rank of interleaved 1F1B holds: its warm-up plus one.

    Divide by V for units of a full rank.

    >>> [interleaved_peak_activations(4, 8, rank) for rank in range(4)]
    [11, 9, 7, 5]
    """
    first_round = round_sizes(num_ranks, num_microbatches, round_size)[0]
    warmup = (num_virtual_stages - 1) * first_round + 2 * (num_ranks - 1 - rank)
    return min(num_virtual_stages * num_microbatches, warmup + 1)


def looped_bfs_peak_activations(num_microbatches: int, num_virtual_stages: int = 2) -> int:
    """Return the most stages' activations that every rank of looped breadth-first holds: those of all microbatches.

    >>> looped_bfs_peak_activations(8)
    16
    """
    return num_virtual_stages * num_microbatches


def looped_num_messages(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2) -> int:
    """Return the number of messages: with two ranks or more, every boundary of stages is one of ranks.

    >>> looped_num_messages(4, 8), looped_num_messages(1, 8)
    (112, 0)
    """
    return 2 * (num_virtual_stages * num_ranks - 1) * num_microbatches if num_ranks > 1 else 0


def _loop_makespan(schedule: str, num_ranks: int, num_microbatches: int, num_virtual_stages: int, cost: Cost) -> Time:
    """The makespan is ((V - 1) * max(M, P) + M + P - 1) * (t_F + t_B).

    For M >= P the bubble of a rank is (P - 1) * (t_F + t_B), 1/V of 1F1B's: published in the times of a full rank, as
    (P - 1) * (t_F + t_B) / V.  With fewer microbatches a rank waits for the first of them to return on the loop, V - 1
    times in each direction.
    """
    check_loop(schedule, num_ranks, num_microbatches, num_virtual_stages)
    ticks = stage_ticks(schedule, num_virtual_stages * num_ranks, cost)
    laps = (num_virtual_stages - 1) * max(num_microbatches, num_ranks)  # a lap takes the longer of the two
    return (laps + num_microbatches + num_ranks - 1) * (ticks.F + ticks.B)


SCHEDULES = (
    Schedule(
        "interleaved",
        interleaved,
        interleaved_makespan,
        interleaved_peak_activations,
        looped_num_messages,
        paired="paired_interleaved",
    ),
    Schedule("looped_bfs", looped_bfs, looped_bfs_makespan, looped_bfs_peak_activations, looped_num_messages),
)
