"""Looped breadth-first: every rank holds V small stages on a loop and runs all microbatches of one before the next.

Chapter: book/pp/interleaved.  In: P ranks, M microbatches, V stages per rank; stage s on rank s % P.
Out: one list of actions per rank.  Times per stage, which is 1/V of a rank's share of the model.
  makespan           ((V - 1) * max(M, P) + M + P - 1) * (t_F + t_B)    as interleaved 1F1B
  live activations   V * M stages on every rank, as GPipe
  messages           2 * (V * P - 1) * M                                as interleaved 1F1B
  blocks             2 * V - 1 blocks of work on one stage: with sharded weights, each block gathers them once
V = 1 is GPipe.  The backwards run first in, first out, so that gradients are summed in the order of the microbatches
and equal those of one process to the last bit.  Torch runs them last in, first out: with equal microbatches the same
makespan and the same peak, but another order of sums.
Elsewhere: torch ScheduleLoopedBFS.
Source: Lamy-Poirier 2023 (arXiv 2211.05953).
"""

from dualpipe_lab.pp.program import Action, B, F, Program, check_counts


def looped_bfs(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2) -> Program:
    """Build the breadth-first program for any number of ranks, microbatches and virtual stages.

    >>> print(looped_bfs(2, 2))
    # Looped BFS: 2 ranks, 4 stages, 2 microbatches
    rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    rank 1: 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """
    check_counts(
        "looped_bfs", num_ranks=num_ranks, num_microbatches=num_microbatches, num_virtual_stages=num_virtual_stages
    )
    num_stages = num_virtual_stages * num_ranks
    ranks = [_one_rank(range(rank, num_stages, num_ranks), num_microbatches) for rank in range(num_ranks)]
    return Program("Looped BFS", ranks, num_stages, num_microbatches, num_directions=1)


def _one_rank(stages: range, num_microbatches: int) -> list[Action]:
    forwards = [Action(stage, F, m) for stage in stages for m in range(num_microbatches)]
    backwards = [Action(stage, B, m) for stage in reversed(stages) for m in range(num_microbatches)]
    return forwards + backwards
