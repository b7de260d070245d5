"""ZB-H1 and ZB-H2: 1F1B with a split backward, whose weight gradients fill the waits.

Chapter: book/pp/zero-bubble.  In: P ranks, M microbatches, a limit of activations.  Out: one list of actions per rank.
H2's idle time is its local bubble plus the start and the end: rank r starts r forwards late, and the ranks end one
after the other.  The local bubble matters only if the next step follows without a barrier; otherwise H1 has the same
makespan with half the activations, unless I is longer than W or than F.  Messages: as 1F1B.
Elsewhere: torch ScheduleInterleavedZeroBubble is H1 (the same order wherever torch is legal), also called ZB1P, as in
d9d; for H2 the paper's authors search with a heuristic under a limit of memory, and torch has no such schedule.
Source: Qi et al. 2024 (arXiv 2401.10241), sections 2.1 to 2.3.
"""

from dualpipe_lab.pp.cost import UNIT_COST, Cost, StageTicks, stage_ticks
from dualpipe_lab.pp.program import Program, check_counts
from dualpipe_lab.pp.schedules.flush import num_messages
from dualpipe_lab.pp.schedules.looped import (
    check_loop,
    loop_cells,
    looped_num_messages,
    round_sizes,
    warmup_steady_cooldown,
)
from dualpipe_lab.pp.schedules.schedule import Schedule
from dualpipe_lab.timeline import Time


def zero_bubble_h1(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1) -> Program:
    """Build the ZB-H1 program for any number of ranks, microbatches and virtual stages.

    Rank r warms up with P - 1 - r forwards as 1F1B does, and runs each W r microbatches after its I: delayed weight
    gradients hold the activations that a rank saves in the warm-up.  Several stages per rank run on the loop of
    interleaved 1F1B.

    >>> print(zero_bubble_h1(2, 3))
    # ZB-H1: 2 ranks, 2 stages, 3 microbatches
    rank 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    rank 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    check_loop("zero_bubble_h1", num_ranks, num_microbatches, num_virtual_stages)
    sizes = round_sizes(num_ranks, num_microbatches)
    ranks = []
    for rank in range(num_ranks):
        cells = loop_cells(rank, num_ranks, sizes, num_virtual_stages)
        num_warmup = (num_virtual_stages - 1) * sizes[0] + num_ranks - 1 - rank
        ranks.append(warmup_steady_cooldown(*cells, num_warmup, weight_delay=rank))
    return Program("ZB-H1", ranks, num_virtual_stages * num_ranks, num_microbatches, num_directions=1)


def zero_bubble_h2(num_ranks: int, num_microbatches: int, in_flight: int | None = None) -> Program:
    """Build the ZB-H2 program for any number of ranks and microbatches.

    `in_flight`: the most activations that a rank may hold, at least `num_ranks`; default 2 * num_ranks - 1.
    Raises ValueError for a smaller limit.

    >>> print(zero_bubble_h2(2, 4))
    # ZB-H2: 2 ranks, 2 stages, 4 microbatches
    rank 0: 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1: 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3
    """
    check_counts("zero_bubble_h2", num_ranks=num_ranks, num_microbatches=num_microbatches)
    extra = max(0, activations_held(num_ranks, num_microbatches, in_flight) - num_ranks)
    ranks = []
    for rank in range(num_ranks):
        cells = [(rank, m) for m in range(num_microbatches)]
        # The additional activations go to further warm-up forwards and to longer delays of W, in the proportion
        # P - 1 - rank to rank.
        waiting = rank * extra // max(1, num_ranks - 1)  # rounded down, so that the warm-up gets the larger part
        num_warmup = num_ranks - 1 - rank + extra - waiting
        ranks.append(warmup_steady_cooldown(cells, cells, num_warmup, weight_delay=rank + waiting))
    return Program("ZB-H2", ranks, num_ranks, num_microbatches, num_directions=1)


def activations_held(num_ranks: int, num_microbatches: int, in_flight: int | None = None) -> int:
    """Return the most activations that every rank holds, until W; ValueError for a limit below the number of ranks.

    >>> activations_held(4, 8), activations_held(4, 6), activations_held(4, 8, in_flight=5)
    (7, 6, 5)
    """
    limit = 2 * num_ranks - 1 if in_flight is None else in_flight
    check_counts("zero_bubble_h2", in_flight=limit)
    if limit < num_ranks:
        raise ValueError(
            f"zero_bubble_h2 needs in_flight to be at least the number of ranks, {num_ranks}, got {limit}; "
            f"use in_flight={num_ranks} (which is ZB-H1) or more"
        )
    return min(num_microbatches, limit)


def zero_bubble_h1_makespan(
    num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1, cost: Cost = UNIT_COST
) -> Time:
    """Return ZB-H1's makespan for equal stages and free links.

    Raises ValueError for other costs, and for fewer microbatches than ranks if a rank has several stages.

    >>> zero_bubble_h1_makespan(4, 8), zero_bubble_h1_makespan(4, 8, cost=Cost(F=5, I=4, W=6))
    (27, 135)
    """
    check_loop("zero_bubble_h1_makespan", num_ranks, num_microbatches, num_virtual_stages)
    if num_virtual_stages > 1 and num_microbatches < num_ranks:
        raise ValueError(
            f"zero_bubble_h1_makespan with {num_virtual_stages} stages per rank holds for at least as many "
            f"microbatches as ranks, got {num_microbatches} and {num_ranks}; use simulate() for fewer"
        )
    ticks = stage_ticks("ZB-H1", num_virtual_stages * num_ranks, cost)
    work = num_virtual_stages * num_microbatches * (ticks.F + ticks.I + ticks.W)
    return work + _idle(num_ranks, min(num_microbatches, num_ranks), ticks)


def zero_bubble_h2_makespan(
    num_ranks: int, num_microbatches: int, in_flight: int | None = None, cost: Cost = UNIT_COST
) -> Time:
    """Return ZB-H2's makespan for equal stages, free links and any limit of activations; ValueError for other costs.

    >>> zero_bubble_h2_makespan(4, 8), zero_bubble_h2_makespan(4, 8, in_flight=5, cost=Cost(F=2, I=3, W=2))
    (27, 63)
    """
    check_counts("zero_bubble_h2_makespan", num_ranks=num_ranks, num_microbatches=num_microbatches)
    ticks = stage_ticks("ZB-H2", num_ranks, cost)
    held = activations_held(num_ranks, num_microbatches, in_flight)
    return num_microbatches * (ticks.F + ticks.I + ticks.W) + _idle(num_ranks, held, ticks)


def zero_bubble_h2_local_bubble(num_ranks: int, num_microbatches: int, cost: Cost = UNIT_COST) -> Time:
    """Return the longest local bubble of ZB-H2 with 2P - 1 activations; ValueError for fewer microbatches.

    It lies between a rank's first start and its last end: (P - 1) * max(0, t_I - t_F, t_F + t_I - 2 * t_W).  For equal
    times that is the published zero.

    >>> zero_bubble_h2_local_bubble(4, 8), zero_bubble_h2_local_bubble(4, 8, Cost(F=1, I=2, W=1))
    (0, 3)
    """
    if num_microbatches < (needed := 2 * num_ranks - 1):
        raise ValueError(
            f"zero_bubble_h2_local_bubble holds for at least {needed} microbatches, got {num_microbatches}; "
            "use Timeline.window for fewer"
        )
    ticks = stage_ticks("ZB-H2", num_ranks, cost)
    return (num_ranks - 1) * max(0, ticks.I - ticks.F, ticks.F + ticks.I - 2 * ticks.W)


def zero_bubble_h1_peak_activations(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1) -> int:
    """Return the most stages' activations that every rank of ZB-H1 holds, until W (1F1B: P - rank).

    >>> zero_bubble_h1_peak_activations(4, 8), zero_bubble_h1_peak_activations(4, 8, num_virtual_stages=2)
    (4, 8)
    """
    first_round = round_sizes(num_ranks, num_microbatches)[0]
    return min(num_virtual_stages * num_microbatches, (num_virtual_stages - 1) * first_round + num_ranks)


def zero_bubble_h2_peak_activations(num_ranks: int, num_microbatches: int, in_flight: int | None = None) -> int:
    """Return the most activations that every rank of ZB-H2 holds, until W.

    >>> zero_bubble_h2_peak_activations(4, 8), zero_bubble_h2_peak_activations(4, 8, in_flight=5)
    (7, 5)
    """
    return activations_held(num_ranks, num_microbatches, in_flight)


def _idle(num_ranks: int, held: int, ticks: StageTicks) -> Time:
    """Each further held activation saves the shortest action; I counts only up to P activations.

    H1, M >= P: (P - 1) * max(t_F, t_I, t_F + t_I - t_W), published as t_F + t_I - t_W: the same iff
    t_W <= min(t_F, t_I).  H1's local bubble is then (P - 1) * max(t_I, t_F + t_I - t_W).
    H2, M >= 2P - 1: (P - 1) * max(t_F, t_I - t_F, t_F + t_I - 2 * t_W).
    """
    saved = min((min(held, num_ranks) - 1) * ticks.I, (held - 1) * ticks.F, (held - 1) * ticks.W)
    return (num_ranks - 1) * (ticks.F + ticks.I) - saved


SCHEDULES = (
    Schedule(
        "zero_bubble_h1",
        zero_bubble_h1,
        zero_bubble_h1_makespan,
        zero_bubble_h1_peak_activations,
        looped_num_messages,
        paired="paired_zero_bubble_h1",
    ),
    Schedule("zero_bubble_h2", zero_bubble_h2, zero_bubble_h2_makespan, zero_bubble_h2_peak_activations, num_messages),
)
