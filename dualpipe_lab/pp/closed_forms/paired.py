"""1F1B, interleaved 1F1B and ZB-H1 with overlapped pairs: exact forms in the ticks of one pair.

Chapter: book/pp/interleaved.  In: P ranks, M microbatches, V stages per rank, costs per stage.
Out: exact ticks, or counts.  R is the size of the first round, L = (V - 1) * R the forwards of all but the last lap.

  1F1B (V = 1), interleaved, any M
    makespan   (max(L, (V - 1) * P) + P) * (t_F + t_B) + (V * M - L - 1) * t_F&B
  ZB-H1, P >= 2, M >= 2 P, for V = 1 M >= 3 P - 4; one rank has interleaved's form
    makespan   (L + 2 P - 1) * t_F + (L + P + 1) * t_I + (L + 2) * t_W + (V * M - L - P) * t_F&B
               + (P - 2) * max(t_I, t_W, 2 t_B - t_F&B)
  pairs        of rank r   V * M - L - 2 * (P - 1 - r) - 1, ZB-H1 r less; 0 if that is negative
  bubble       of rank r   makespan - V * M * (t_F + t_B) + pairs * (t_F + t_B - t_F&B)
  live activations, in stages   1F1B, interleaved L + 2 * (P - r), ZB-H1 L + 2 * P - r, but never more than V * M
  messages     2 * (V * P - 1) * M
All need equal stages, free links, and pairs at least as long as their longer half; ZB-H1 also t_B = t_I + t_W.  Under
these conditions they hold for any costs, also for pairs without a gain: found and checked with the simulator, not
proved.
"""

from dualpipe_lab.pp.closed_forms.equal_stages import StageTicks, stage_ticks
from dualpipe_lab.pp.cost import UNIT_COST, Cost
from dualpipe_lab.pp.program import check_counts
from dualpipe_lab.pp.schedules.interleaved import round_sizes
from dualpipe_lab.timeline import Time


def paired_one_f_one_b_makespan(num_ranks: int, num_microbatches: int, cost: Cost = UNIT_COST) -> Time:
    """Return paired 1F1B's makespan; ValueError for unequal stages, slow links, and pairs shorter than F or B.

    >>> paired_one_f_one_b_makespan(8, 24), paired_one_f_one_b_makespan(8, 24, Cost(F=2, I=2, W=2, overlap=5))
    (93, 163)
    """
    return paired_interleaved_makespan(num_ranks, num_microbatches, 1, cost)


def paired_interleaved_makespan(
    num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2, cost: Cost = UNIT_COST
) -> Time:
    """Return paired interleaved 1F1B's makespan; ValueError as `paired_one_f_one_b_makespan`.

    Stages of a quarter of a rank's share, times in eighths: 68.375 where F, I and W of a share take 1 and a pair 2.5.

    >>> paired_interleaved_makespan(8, 24, 4, Cost(F=2, I=2, W=2, overlap=5)) / 8
    68.375
    """
    t = _ticks("paired_interleaved", num_ranks, num_microbatches, num_virtual_stages, cost)
    lap = _lap(num_ranks, num_microbatches, num_virtual_stages)
    apart = max(lap, (num_virtual_stages - 1) * num_ranks) + num_ranks
    return apart * (t.F + t.B) + (num_virtual_stages * num_microbatches - lap - 1) * t.pair


def paired_zero_bubble_h1_makespan(
    num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1, cost: Cost = UNIT_COST
) -> Time:
    """Return paired ZB-H1's makespan; ValueError for fewer microbatches than stated above, and for other costs.

    >>> paired_zero_bubble_h1_makespan(8, 24, 4, Cost(F=2, I=2, W=2, overlap=5)) / 8
    66.75
    """
    t = _ticks("paired_zero_bubble_h1", num_ranks, num_microbatches, num_virtual_stages, cost)
    if t.B != t.I + t.W:
        raise ValueError(f"paired_zero_bubble_h1_makespan needs B = I + W, got B={t.B}, I={t.I}, W={t.W}; leave B out")
    if num_ranks == 1:
        return paired_interleaved_makespan(1, num_microbatches, num_virtual_stages, cost)
    needed = 2 * num_ranks if num_virtual_stages > 1 else 3 * num_ranks - 4
    if num_microbatches < needed:
        raise ValueError(
            f"paired_zero_bubble_h1_makespan holds for at least {needed} microbatches on {num_ranks} ranks with "
            f"{num_virtual_stages} stages each, got {num_microbatches}; use simulate()"
        )
    lap = _lap(num_ranks, num_microbatches, num_virtual_stages)
    apart = (lap + 2 * num_ranks - 1) * t.F + (lap + num_ranks + 1) * t.I + (lap + 2) * t.W
    paired = (num_virtual_stages * num_microbatches - lap - num_ranks) * t.pair
    return apart + paired + (num_ranks - 2) * max(t.I, t.W, 2 * t.B - t.pair)


def paired_num_pairs(
    num_ranks: int, num_microbatches: int, rank: int, num_virtual_stages: int = 1, split: bool = False
) -> int:
    """Return the number of overlapped pairs that one rank runs; `split`: in ZB-H1.

    >>> [paired_num_pairs(8, 24, rank, split=True) for rank in range(8)]
    [9, 10, 11, 12, 13, 14, 15, 16]
    """
    warmup = _lap(num_ranks, num_microbatches, num_virtual_stages) + 2 * (num_ranks - 1 - rank) + 1
    return max(0, num_virtual_stages * num_microbatches - warmup - rank * split)


def paired_peak_activations(
    num_ranks: int, num_microbatches: int, rank: int, num_virtual_stages: int = 1, split: bool = False
) -> int:
    """Return the most stages' activations that one rank holds; `split`: in ZB-H1.

    >>> paired_peak_activations(8, 24, 0, 4), paired_peak_activations(8, 24, 7, 4, split=True)
    (40, 33)
    """
    held = _lap(num_ranks, num_microbatches, num_virtual_stages) + 2 * (num_ranks - rank) + rank * split
    return min(num_virtual_stages * num_microbatches, held)


def _lap(num_ranks: int, num_microbatches: int, num_virtual_stages: int) -> int:
    return (num_virtual_stages - 1) * round_sizes(num_ranks, num_microbatches)[0]


def _ticks(schedule: str, num_ranks: int, num_microbatches: int, num_virtual_stages: int, cost: Cost) -> StageTicks:
    check_counts(
        schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, num_virtual_stages=num_virtual_stages
    )
    ticks = stage_ticks(schedule, num_virtual_stages * num_ranks, cost)
    if ticks.pair < max(ticks.F, ticks.B):
        raise ValueError(
            f"{schedule} has a closed form for pairs that last as long as their longer half, got overlap={ticks.pair} "
            f"for F={ticks.F} and B={ticks.B}; use {max(ticks.F, ticks.B)} or more, or simulate()"
        )
    return ticks
