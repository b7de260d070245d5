"""Interleaved 1F1B and looped breadth-first: one loop, two orders, equal makespans.

Chapter: book/pp/interleaved.  In: P ranks, M microbatches, V stages per rank, costs per stage.
Out: exact ticks, or counts.

  both, equal stages, free links   makespan  ((V - 1) * max(M, P) + M + P - 1) * (t_F + t_B)
                                   bubble    (P - 1) * (t_F + t_B) on every rank for M >= P
    published as (P - 1) * (t_F + t_B) / V with the times of a full rank: equal for M >= P; with fewer microbatches a
    rank waits for the first of them to return on the loop, V - 1 times in each direction
  live activations, in stages      interleaved (V - 1) * R + 2 * (P - 1 - rank) + 1, R the size of the first round,
                                   breadth-first V * M; in units of a full rank: divide by V
  messages                         2 * (V * P - 1) * M
Sources: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2; Lamy-Poirier 2023 (arXiv 2211.05953).
"""

from dualpipe_lab.pp.closed_forms.equal_stages import stage_ticks
from dualpipe_lab.pp.cost import UNIT_COST, Cost
from dualpipe_lab.pp.program import check_counts
from dualpipe_lab.pp.schedules.interleaved import round_sizes
from dualpipe_lab.timeline import Time


def interleaved_makespan(
    num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2, cost: Cost = UNIT_COST
) -> Time:
    """Return interleaved 1F1B's makespan for equal stages and free links; ValueError for other costs.

    With free links, the size of the rounds makes no difference.

    >>> interleaved_makespan(4, 8, num_virtual_stages=2)
    57
    """
    return _makespan("interleaved", num_ranks, num_microbatches, num_virtual_stages, cost)


def looped_bfs_makespan(
    num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2, cost: Cost = UNIT_COST
) -> Time:
    """Return the makespan of looped breadth-first for equal stages and free links; ValueError for other costs.

    >>> looped_bfs_makespan(4, 8, num_virtual_stages=2)
    57
    """
    return _makespan("looped_bfs", num_ranks, num_microbatches, num_virtual_stages, cost)


def interleaved_peak_activations(
    num_ranks: int, num_microbatches: int, rank: int, num_virtual_stages: int = 2, round_size: int | None = None
) -> int:
    """Return the most stages' activations that one rank of interleaved 1F1B holds: its warm-up plus one.

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


def _makespan(schedule: str, num_ranks: int, num_microbatches: int, num_virtual_stages: int, cost: Cost) -> Time:
    check_counts(
        schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, num_virtual_stages=num_virtual_stages
    )
    ticks = stage_ticks(schedule, num_virtual_stages * num_ranks, cost)
    laps = (num_virtual_stages - 1) * max(num_microbatches, num_ranks)  # a lap takes the longer of the two
    return (laps + num_microbatches + num_ranks - 1) * (ticks.F + ticks.B)
