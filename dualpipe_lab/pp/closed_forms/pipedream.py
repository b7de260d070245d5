"""PipeDream without a flush: the weight version of each minibatch, and the number of versions that a stage keeps.

Chapter: book/pp/pipedream.  In: P ranks, stage s, minibatch j of a run, counted from 0.  Out: numbers of versions.

                     version of minibatch j on stage s      versions kept on stage s, in a long run
  weight stashing    max(0, j - (P - 1 - s))                P - s
  vertical sync      max(0, j - (P - 1))                    P
  2BW                max(0, t - 1) in batch t; t if P = 1   2, for batches of at least P - 1 microbatches; 1 if P = 1
A version is the number of updates before it; the current version counts as kept.  A run takes the makespan of one 1F1B
step, `one_f_one_b_makespan`, with M the number of minibatches: its bubble fraction is (P - 1) / (M + P - 1).
`dualpipe_lab.pp.versions` finds the same numbers by counting.
Sources: Narayanan et al. 2019 (SOSP), section 3.3; Narayanan et al. 2021 (arXiv 2006.09503), section 3.1, which asks
for batches of at least P microbatches.
"""

from dualpipe_lab.pp.program import check_counts


def stashed_version(num_ranks: int, stage: int, minibatch: int) -> int:
    """Return the version for F and B of a minibatch on a stage under weight stashing.

    >>> [stashed_version(3, stage=0, minibatch=j) for j in range(5)]
    [0, 0, 0, 1, 2]
    """
    return max(0, minibatch - (num_ranks - 1 - stage))


def stashed_versions_kept(num_ranks: int, stage: int, num_minibatches: int) -> int:
    """Return the most versions that a stage holds: P - s if the run has at least 2 (P - 1 - s) minibatches.

    In a shorter run there are fewer, because all minibatches of the warm-up use version 0.

    >>> [stashed_versions_kept(4, stage, num_minibatches=10) for stage in range(4)]
    [4, 3, 2, 1]
    """
    check_counts("stashed_versions_kept", num_ranks=num_ranks, num_minibatches=num_minibatches)
    delay = num_ranks - 1 - stage
    return min(1 + delay, num_minibatches, max(2, num_minibatches - delay + 1))


def synced_version(num_ranks: int, minibatch: int) -> int:
    """Return the version for a minibatch under vertical sync, on every stage that of stage 0.

    >>> [synced_version(3, minibatch=j) for j in range(5)]
    [0, 0, 0, 1, 2]
    """
    return stashed_version(num_ranks, 0, minibatch)


def synced_versions_kept(num_ranks: int, num_minibatches: int) -> int:
    """Return the most versions that each stage holds under vertical sync: in a long run P, also on the last stage.

    >>> synced_versions_kept(4, num_minibatches=10)
    4
    """
    return stashed_versions_kept(num_ranks, 0, num_minibatches)


def double_buffered_version(num_ranks: int, batch: int, batch_size: int) -> int:
    """Return the version for the microbatches of a batch under 2BW, on every stage.

    Raises ValueError for batches of fewer than P - 1 microbatches: the previous version would not exist yet.

    >>> [double_buffered_version(4, batch, batch_size=4) for batch in range(4)]
    [0, 0, 1, 2]
    """
    check_counts("double_buffered_version", num_ranks=num_ranks, batch_size=batch_size)
    if batch_size < num_ranks - 1:
        raise ValueError(
            f"2BW keeps two versions for batches of at least P - 1 microbatches, got {batch_size} for {num_ranks} "
            f"ranks; use {num_ranks - 1} or more"
        )
    return max(0, batch - min(1, num_ranks - 1))


def double_buffered_versions_kept(num_ranks: int) -> int:
    """Return the most versions that each stage holds under 2BW in a run of at least 3 batches.

    >>> double_buffered_versions_kept(4)
    2
    """
    return min(2, num_ranks)
