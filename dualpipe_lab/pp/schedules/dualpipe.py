"""DualPipe: microbatches enter at both ends, and forwards of one direction overlap with backwards of the other.

Chapter: book/pp/dualpipe.  In: P ranks (even), M microbatches (even, at least 2P).  Out: one list of steps per rank.
Every rank holds two stages: stage `rank` for the first M/2 microbatches, which enter at rank 0, and stage P - 1 - rank,
that of its mirror, for the others, which enter at rank P - 1.  The mirrors' gradients must be summed before the update.
  bubble             (P/2 - 1) * (t_F&B + t_B - 3 t_W)   if t_F = t_I >= t_W; `closed_forms.dualpipe_bubble` for any
  live activations   P + 1 on every rank
  weights            twice those of 1F1B
  messages           2 * (P - 1) * M
Elsewhere: DeepSeek's DualPipe, the same order action by action; torch cannot place a stage on two ranks.
Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.1, figure 5 (P = 8, M = 20).
Two directions: Li and Hoefler 2021, Chimera (arXiv 2107.06925), section 3.
"""

from dualpipe_lab.pp.program import Program, ProgramStep, check_counts
from dualpipe_lab.pp.schedules.eight_steps import Flow, steps_of
from dualpipe_lab.pp.schedules.two_directions import check_even_microbatches, check_even_ranks


def dualpipe(num_ranks: int, num_microbatches: int) -> Program:
    """Build the DualPipe program; microbatches M/2 to M-1 travel from the last rank to the first.

    Raises ValueError for an odd number of ranks or of microbatches, and for fewer microbatches than two per rank.

    >>> print(" ".join(map(str, dualpipe(2, 4).ranks[0])))
    0F0 1F2 0F1 1B2 (1F3;0B0)OVERLAP_F_B 1B3 0I1 0W1
    """
    check_dualpipe(num_ranks, num_microbatches)
    ranks = [_one_rank(rank, num_ranks, num_microbatches // 2) for rank in range(num_ranks)]
    return Program("DualPipe", ranks, num_stages=num_ranks, num_microbatches=num_microbatches, num_directions=2)


def check_dualpipe(num_ranks: int, num_microbatches: int) -> None:
    """Raise ValueError for sizes that DualPipe cannot have."""
    check_counts("dualpipe", num_ranks=num_ranks, num_microbatches=num_microbatches)
    check_even_ranks("dualpipe", num_ranks, instead="dualpipev or ")
    if num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"dualpipe needs at least two microbatches per rank, got {num_microbatches} for {num_ranks} ranks; "
            f"use easy_dualpipe or {2 * num_ranks} microbatches or more"
        )
    check_even_microbatches("dualpipe", num_microbatches)


def _one_rank(rank: int, num_ranks: int, per_flow: int) -> list[ProgramStep]:
    mirror = num_ranks - 1 - rank
    downwards, upwards = Flow(rank, 0), Flow(mirror, per_flow)
    # A rank's flow 0 is the one whose end is nearer, so both halves of the ranks do the same, mirrored.
    flows = (downwards, upwards) if rank < mirror else (upwards, downwards)
    return steps_of(flows, min(rank, mirror), num_ranks // 2, per_flow)
