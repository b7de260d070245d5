"""ZB-H1: 1F1B with a split backward, whose weight gradients fill the waits, with 1F1B's memory.

Chapter: book/pp/zero-bubble.  In: P ranks, M microbatches, V stages per rank (1: stage = rank).
Out: one list of actions per rank.  Times per stage.
  bubble per rank    (P - 1) * max(t_F, t_I, t_F + t_I - t_W) for M >= P; published: the last of the three, which is the
                     largest iff t_W <= min(t_F, t_I)
  live activations   min(M, P) on every rank, held until W (1F1B: P - rank)
  messages           2 * (P - 1) * M                as 1F1B
Rank r warms up with P - 1 - r forwards as 1F1B does, and runs each W r microbatches after its I: the activations that a
rank saves in the warm-up are held by delayed weight gradients.
V > 1 uses interleaved 1F1B's loop: the same bubble in times of smaller stages, (V - 1) * R + P live stages on every
rank, R the size of the first round.
Elsewhere: torch ScheduleInterleavedZeroBubble (the same order wherever torch is legal), also called ZB1P; d9d ZB1P.
Source: Qi et al. 2024 (arXiv 2401.10241), section 2.1.
"""

from collections.abc import Sequence

from dualpipe_lab.pp.program import Program, ProgramStep, check_counts
from dualpipe_lab.pp.schedules.interleaved import loop_cells, round_sizes
from dualpipe_lab.pp.schedules.warmup_steady_cooldown import warmup_steady_cooldown


def zero_bubble_h1(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1) -> Program:
    """Build the ZB-H1 program for any number of ranks, microbatches and virtual stages.

    >>> print(zero_bubble_h1(2, 3))
    # ZB-H1: 2 ranks, 2 stages, 3 microbatches
    rank 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    rank 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    check_counts(
        "zero_bubble_h1", num_ranks=num_ranks, num_microbatches=num_microbatches, num_virtual_stages=num_virtual_stages
    )
    sizes = round_sizes(num_ranks, num_microbatches)
    ranks = [_one_rank(rank, num_ranks, sizes, num_virtual_stages) for rank in range(num_ranks)]
    return Program("ZB-H1", ranks, num_virtual_stages * num_ranks, num_microbatches, num_directions=1)


def _one_rank(rank: int, num_ranks: int, sizes: Sequence[int], num_virtual_stages: int) -> list[ProgramStep]:
    forwards, backwards = loop_cells(rank, num_ranks, sizes, num_virtual_stages)
    num_warmup = (num_virtual_stages - 1) * sizes[0] + num_ranks - 1 - rank
    return warmup_steady_cooldown(forwards, backwards, num_warmup, weight_delay=rank)
