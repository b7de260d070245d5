"""DualPipeV: DualPipe on half of its ranks; the stages form a V, and no stage has a copy.

Chapter: book/pp/dualpipev.  In: P ranks (any), M microbatches (at least 2P).  Out: one list of steps per rank.
The model has 2P stages of half the size.  Rank r holds stages r and 2P-1-r: a microbatch passes the ranks downwards,
then upwards.  The upward microbatches take the place of DualPipe's other direction: this program is the first P ranks
of `dualpipe(2 * P, 2 * M)`.  With the times of a half-size stage:
  bubble             (P - 1) * (t_F&B + t_B - 3 t_W)   if t_F = t_I >= t_W; `closed_forms.dualpipev_bubble` for any
  live activations   2P + 1 half-size ones on every rank, which is P + 1/2 of 1F1B's
  weights            as 1F1B: every stage once
  messages           4 * (P - 1) * M; the tip of the V, on the last rank, needs none
Elsewhere: DeepSeek's DualPipeV and torch ScheduleDualPipeV, the same order action by action.
Source: Qi, Wan, Huang and Lin 2025 (Sea AI Lab), "DualPipe could be better without the Dual", the cut in half;
DeepSeek-AI 2025, github.com/deepseek-ai/DualPipe, README.
"""

from dualpipe_lab.pp.program import Program, check_counts
from dualpipe_lab.pp.schedules.eight_steps import Flow, steps_of


def dualpipev(num_ranks: int, num_microbatches: int) -> Program:
    """Build the DualPipeV program; raises ValueError for fewer than two microbatches per rank.

    >>> print(" ".join(map(str, dualpipev(1, 2).ranks[0])))
    0F0 1F0 0F1 1B0 (1F1;0B0)OVERLAP_F_B 1B1 0I1 0W1
    """
    check_dualpipev(num_ranks, num_microbatches)
    last = 2 * num_ranks - 1
    ranks = [
        steps_of((Flow(rank, 0), Flow(last - rank, 0)), rank, num_ranks, num_microbatches) for rank in range(num_ranks)
    ]
    return Program("DualPipeV", ranks, num_stages=last + 1, num_microbatches=num_microbatches, num_directions=1)


def check_dualpipev(num_ranks: int, num_microbatches: int) -> None:
    """Raise ValueError for sizes that DualPipeV cannot have."""
    check_counts("dualpipev", num_ranks=num_ranks, num_microbatches=num_microbatches)
    if num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"dualpipev needs at least two microbatches per rank, got {num_microbatches} for {num_ranks} ranks; "
            f"use {2 * num_ranks} microbatches or more, or a schedule such as 1f1b"
        )
