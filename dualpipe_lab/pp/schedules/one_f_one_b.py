"""1F1B: after warmup, every forward is followed by one backward (PipeDream-flush).

Chapter: book/pp/one-f-one-b.  In: P ranks, M microbatches.  Out: one list of actions per rank; stage = rank.
  makespan           (M + P - 1) * (t_F + t_B)      the same bubble as GPipe
  live activations   min(P - rank, M)               GPipe: M
  messages           2 * (P - 1) * M                as GPipe
Elsewhere: Megatron forward_backward_pipelining_without_interleaving; torch Schedule1F1B (which needs M >= P).
Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.
"""

from dualpipe_lab.pp.program import Action, B, F, Program, check_counts


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Program:
    """Build the 1F1B program for any number of ranks and microbatches.

    >>> " ".join(map(str, one_f_one_b(2, 3).ranks[0]))
    '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    check_counts("one_f_one_b", num_ranks=num_ranks, num_microbatches=num_microbatches)
    ranks = [_one_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    return Program("1F1B", ranks, num_stages=num_ranks, num_microbatches=num_microbatches, num_directions=1)


def _one_rank(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    num_warmup = min(num_ranks - rank - 1, num_microbatches)  # fill the stages below me
    num_steady = num_microbatches - num_warmup
    warmup = [Action(rank, F, m) for m in range(num_warmup)]
    steady = [Action(rank, kind, m) for i in range(num_steady) for kind, m in ((F, num_warmup + i), (B, i))]
    cooldown = [Action(rank, B, num_steady + i) for i in range(num_warmup)]
    return warmup + steady + cooldown
