"""ZB-H1, ZB-H2 and every limit of activations between them: one form for the idle time.

Chapter: book/pp/zero-bubble.  In: P ranks, M microbatches, a limit of activations, costs per stage.
Out: exact ticks, or counts.

  one stage per rank, equal stages, free links, K = min(M, in_flight) with in_flight = P for H1, 2 * P - 1 for H2
    idle per rank   (P - 1) * (t_F + t_I) - min((min(K, P) - 1) * t_I, (K - 1) * t_F, (K - 1) * t_W)
    H1, M >= P      (P - 1) * max(t_F, t_I, t_F + t_I - t_W), published as t_F + t_I - t_W: the same iff
                    t_W <= min(t_F, t_I)
    H2, M >= 2P-1   (P - 1) * max(t_F, t_I - t_F, t_F + t_I - 2 * t_W)
  local bubble, from a rank's first start to its last end, the longest of all ranks
    H1, M >= P      (P - 1) * max(t_I, t_F + t_I - t_W)
    H2, M >= 2P-1   (P - 1) * max(0, t_I - t_F, t_F + t_I - 2 * t_W), published as zero for equal times
  live activations  K on every rank, held until W
Source: Qi et al. 2024 (arXiv 2401.10241), sections 2.1 to 2.3, for the published ones.
"""

from dualpipe_lab.pp.closed_forms.equal_stages import StageTicks, stage_ticks
from dualpipe_lab.pp.cost import UNIT_COST, Cost
from dualpipe_lab.pp.program import check_counts
from dualpipe_lab.pp.schedules.interleaved import round_sizes
from dualpipe_lab.pp.schedules.zero_bubble_h2 import activations_held
from dualpipe_lab.timeline import Time


def zero_bubble_h1_makespan(
    num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1, cost: Cost = UNIT_COST
) -> Time:
    """Return ZB-H1's makespan for equal stages and free links.

    Raises ValueError for other costs, and for fewer microbatches than ranks if a rank has several stages.

    >>> zero_bubble_h1_makespan(4, 8), zero_bubble_h1_makespan(4, 8, cost=Cost(F=5, I=4, W=6))
    (27, 135)
    """
    counts = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_virtual_stages": num_virtual_stages}
    check_counts("zero_bubble_h1_makespan", **counts)
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


def zero_bubble_h1_local_bubble(num_ranks: int, num_microbatches: int, cost: Cost = UNIT_COST) -> Time:
    """Return the longest local bubble of ZB-H1, one stage per rank; ValueError for fewer microbatches than ranks.

    >>> zero_bubble_h1_local_bubble(4, 8)
    3
    """
    _check_enough("zero_bubble_h1_local_bubble", num_microbatches, num_ranks)
    ticks = stage_ticks("ZB-H1", num_ranks, cost)
    return (num_ranks - 1) * max(ticks.I, ticks.F + ticks.I - ticks.W)


def zero_bubble_h2_local_bubble(num_ranks: int, num_microbatches: int, cost: Cost = UNIT_COST) -> Time:
    """Return the longest local bubble of ZB-H2 with 2P - 1 activations; ValueError for fewer microbatches.

    >>> zero_bubble_h2_local_bubble(4, 8), zero_bubble_h2_local_bubble(4, 8, Cost(F=1, I=2, W=1))
    (0, 3)
    """
    _check_enough("zero_bubble_h2_local_bubble", num_microbatches, 2 * num_ranks - 1)
    ticks = stage_ticks("ZB-H2", num_ranks, cost)
    return (num_ranks - 1) * max(0, ticks.I - ticks.F, ticks.F + ticks.I - 2 * ticks.W)


def zero_bubble_h1_peak_activations(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1) -> int:
    """Return the most stages' activations that every rank of ZB-H1 holds, until W.

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
    """Each further held activation saves the shortest action; I counts only up to P activations."""
    saved = min((min(held, num_ranks) - 1) * ticks.I, (held - 1) * ticks.F, (held - 1) * ticks.W)
    return (num_ranks - 1) * (ticks.F + ticks.I) - saved


def _check_enough(form: str, num_microbatches: int, needed: int) -> None:
    if num_microbatches < needed:
        raise ValueError(
            f"{form} holds for at least {needed} microbatches, got {num_microbatches}; use Timeline.window for fewer"
        )
