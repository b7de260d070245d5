"""V-Half: a V of stages with half of 1F1B's activations and no idle time in the middle of a step.

Chapter: book/pp/v-shapes.  In: P ranks, M microbatches; rank r has the stages r and 2P-1-r, half as large as 1F1B's.
Out: one list of actions per rank.  With the times of a half-size stage:
  idle per rank      for t_F = t_I = t_W = t: t * (3P - 7) for even P up to 12, t * (3P - 4) for odd P, M >= P
  per microbatch     max(2 * (t_F + t_I + t_W), 4 * t_I) for t_I >= t_F: full speed iff t_I <= t_F + t_W
  live activations   P + 2 half-size ones on every rank for even P, P + 1 for odd P: half of 1F1B's plus one or two
  messages           4 * (P - 1) * M; the tip of the V, on the last rank, needs none
In the building block a microbatch takes two ticks per rank on its way down and one on its way up.  In 1F1B on 2P ranks
stage s holds 2P - s microbatches.  Here its limit is half of that, rounded up (for even P half of 2P - s + 1), so that
the limits of a rank's two stages have the same sum on every rank.
Elsewhere: sail-sg `zbv_greedy` with 'half'.  For equal times it has the same idle time and memory at 4 and 8 ranks.
Source: Qi et al. 2024 (arXiv 2405.15362), section 3.
"""

from dualpipe_lab.pp.program import Program, check_counts
from dualpipe_lab.pp.schedules.building_block import BuildingBlock


def v_half(num_ranks: int, num_microbatches: int) -> Program:
    """Build the V-Half program for any number of ranks and microbatches.

    >>> print(v_half(2, 2))
    # V-Half: 2 ranks, 4 stages, 2 microbatches
    rank 0: 0F0 0F1 3F0 3I0 3W0 3F1 0I0 3I1 3W1 0W0 0I1 0W1
    rank 1: 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 2I1 1I1 2W1 1W1
    """
    check_counts("v_half", num_ranks=num_ranks, num_microbatches=num_microbatches)
    num_stages, even = 2 * num_ranks, num_ranks % 2 == 0
    limits = [(num_stages - stage + 1 + even) // 2 for stage in range(num_stages)]
    rows = _block(num_ranks).squeeze(num_microbatches, limits)
    return Program("V-Half", rows, num_stages, num_microbatches, num_directions=1)


def _block(num_ranks: int) -> BuildingBlock:
    down, up = range(num_ranks), range(num_ranks, 2 * num_ranks)
    forwards = [2 * stage for stage in down] + [num_ranks - 1 + stage for stage in up]
    # Without three ticks' pause after the last F, F and I would collide on an even number of ranks.
    turned = forwards[-1] + (4 if num_ranks % 2 == 0 else 1)
    coming_down = [turned + 2 * (2 * num_ranks - 1 - stage) for stage in up]
    going_up = [coming_down[0] + 1 + num_ranks - stage for stage in down]
    return BuildingBlock(forwards, going_up + coming_down)
