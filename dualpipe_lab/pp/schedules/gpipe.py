"""GPipe: all forwards, then all backwards, then one synchronous update.

Chapter: book/pp/gpipe.  In: P ranks, M microbatches.  Out: one list of actions per rank; stage = rank.
  makespan           (M + P - 1) * (t_F + t_B)
  bubble per rank    (P - 1) * (t_F + t_B), which is (P - 1) / (M + P - 1) of the makespan
  live activations   M on every rank
  messages           2 * (P - 1) * M
The backwards run first in, first out.  Gradients are summed in the order of the microbatches, as in gradient
accumulation on one process, and are bitwise equal to that.
Elsewhere: torch ScheduleGPipe; d9d's gpipe runs its backwards last in, first out.
Source: Huang et al. 2019 (arXiv 1811.06965), section 2.3.
"""

from dualpipe_lab.pp.program import Action, B, F, Program, check_counts


def gpipe(num_ranks: int, num_microbatches: int) -> Program:
    """Build the GPipe program for any number of ranks and microbatches.

    >>> " ".join(map(str, gpipe(2, 3).ranks[1]))
    '1F0 1F1 1F2 1B0 1B1 1B2'
    """
    check_counts("gpipe", num_ranks=num_ranks, num_microbatches=num_microbatches)
    ranks = [[Action(rank, kind, m) for kind in (F, B) for m in range(num_microbatches)] for rank in range(num_ranks)]
    return Program("GPipe", ranks, num_stages=num_ranks, num_microbatches=num_microbatches, num_directions=1)
