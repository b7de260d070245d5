"""ZB-H2: ZB-H1 with more live activations, which remove the idle time inside every rank's work.

Chapter: book/pp/zero-bubble.  In: P ranks, M microbatches, a limit of activations; stage = rank.
Out: one list of actions per rank.
  live activations   K = min(M, in_flight) on every rank, held until W; in_flight = 2 * P - 1 is the paper's ZB-H2
  idle per rank      (P - 1) * (t_F + t_I) - min((min(K, P) - 1) * t_I, (K - 1) * t_F, (K - 1) * t_W)
  local bubble       (P - 1) * max(0, t_I - t_F, t_F + t_I - 2 * t_W) for K = 2 * P - 1: zero for equal times
  messages           2 * (P - 1) * M                as 1F1B
The idle time is the local bubble plus the start and the end: rank r starts r forwards late, and the ranks end one after
the other.  The local bubble matters only if the next step follows without a barrier; otherwise ZB-H1 has the same
makespan with half the activations, unless I is longer than W or than F.
Rank r uses the E = K - P additional activations for further warm-up forwards and for longer delays of its W, in the
proportion P - 1 - r to r.  E = 0 is ZB-H1.
Elsewhere: the paper's authors search with a heuristic under a limit of memory; torch has no such schedule.
Source: Qi et al. 2024 (arXiv 2401.10241), section 2.2.
"""

from dualpipe_lab.pp.program import Program, ProgramStep, check_counts
from dualpipe_lab.pp.schedules.warmup_steady_cooldown import warmup_steady_cooldown


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
    ranks = [_one_rank(rank, num_ranks, num_microbatches, extra) for rank in range(num_ranks)]
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


def _one_rank(rank: int, num_ranks: int, num_microbatches: int, extra: int) -> list[ProgramStep]:
    cells = [(rank, m) for m in range(num_microbatches)]
    waiting = rank * extra // max(1, num_ranks - 1)  # rounded down, so that the warm-up gets the larger part
    return warmup_steady_cooldown(cells, cells, num_ranks - 1 - rank + extra - waiting, weight_delay=rank + waiting)
