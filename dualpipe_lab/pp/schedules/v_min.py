"""V-Min: a V of stages on which microbatches never wait; each rank holds a third of 1F1B's activations.

Chapter: book/pp/v-shapes.  In: P ranks, M microbatches; rank r has the stages r and 2P-1-r, half as large as 1F1B's.
Out: one list of actions per rank.  With the times of a half-size stage:
  makespan           6 * (M - 1) * t_F + 4 * P * t_F + t_W if t_F = t_I >= t_W and P > 1: idle (4P - 5) for equal times
  per microbatch     max(2 * (t_F + t_I + t_W), 6 * max(t_F, t_I)): full speed only if 2 t_W covers the rest
  live activations   2 * ((P + 4) // 3) half-size ones: a third of 1F1B's 2P, plus at most two by rounding
  messages           4 * (P - 1) * M; the tip of the V, on the last rank, needs none
A microbatch passes one stage per tick, down and up, and again for I; the next microbatch enters six ticks later.  All
ranks move in lock-step, and each of the six ticks takes the time of the longer of F and I.
Elsewhere: sail-sg `zbv_greedy` with 'min'.  For equal times it has the same idle time and memory at 4 and 8 ranks.
Source: Qi et al. 2024 (arXiv 2405.15362), section 3.
"""

from dualpipe_lab.pp.program import Program, check_counts
from dualpipe_lab.pp.schedules.building_block import BuildingBlock


def v_min(num_ranks: int, num_microbatches: int) -> Program:
    """Build the V-Min program for any number of ranks and microbatches.

    >>> print(v_min(2, 2))
    # V-Min: 2 ranks, 4 stages, 2 microbatches
    rank 0: 0F0 3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0I1 0W1
    rank 1: 1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 2W1 1W1
    """
    check_counts("v_min", num_ranks=num_ranks, num_microbatches=num_microbatches)
    num_stages = 2 * num_ranks
    # Without two ticks' pause after the last F, F and I would collide where 3 divides the number of ranks.
    turned = num_stages + (2 if num_ranks % 3 == 0 else 0)
    block = BuildingBlock(range(num_stages), [turned + num_stages - 1 - stage for stage in range(num_stages)])
    return Program("V-Min", block.repeat(num_microbatches), num_stages, num_microbatches, num_directions=1)
