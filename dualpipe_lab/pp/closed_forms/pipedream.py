"""PipeDream without a flush: which weights a minibatch sees and how many versions a stage keeps.

Chapter: book/pp/pipedream.  In: P ranks, stage s, minibatch j of a run, counted from 0.  Out: numbers of versions.

                     version of minibatch j on stage s      versions kept on stage s, in a long run
  weight stashing    max(0, j - (P - 1 - s))                P - s
  vertical sync      max(0, j - (P - 1))                    P
  2BW                max(0, t - 1) in batch t; t if P = 1   2, for batches of at least P - 1 microbatches; 1 if P = 1
A version is the number of updates made before; the current one counts among those kept.  The time of a run is that of
1F1B, `one_f_one_b_makespan`, once: its bubble is (P - 1) / (M + P - 1) of it, where M counts the run's minibatches.
The same numbers are found by counting: `dualpipe_lab.pp.versions`.
Sources: Narayanan et al. 2019 (SOSP), section 3.3; Narayanan et al. 2021 (arXiv 2006.09503), section 3.1, which asks
for batches of at least P microbatches.
"""

from dualpipe_lab.pp.program import check_counts


def stashed_version(num_ranks: int, stage: int, minibatch: int) -> int:
    """Return the version that a stage uses for a minibatch, forward and backward, under weight stashing.

    >>> [stashed_version(3, stage=0, minibatch=j) for j in range(5)]
    [0, 0, 0, 1, 2]
    """
    return max(0, minibatch - (num_ranks - 1 - stage))


def stashed_versions_kept(num_ranks: int, stage: int, num_minibatches: int) -> int:
    """Return how many versions a stage holds at most: P - s as soon as the run has 2 (P - 1 - s) minibatches.

    In a shorter run it is fewer, because all minibatches of the warm-up use version 0.

    >>> [stashed_versions_kept(4, stage, num_minibatches=10) for stage in range(4)]
    [4, 3, 2, 1]
    """
    check_counts("stashed_versions_kept", num_ranks=num_ranks, num_minibatches=num_minibatches)
    delay = num_ranks - 1 - stage
    return min(1 + delay, num_minibatches, max(2, num_minibatches - delay + 1))


def synced_version(num_ranks: int, minibatch: int) -> int:
    """Return the version that every stage uses for a minibatch under vertical sync: stage 0's.

    >>> [synced_version(3, minibatch=j) for j in range(5)]
    [0, 0, 0, 1, 2]
    """
    return stashed_version(num_ranks, 0, minibatch)


def synced_versions_kept(num_ranks: int, num_minibatches: int) -> int:
    """Return how many versions each stage holds at most under vertical sync: P, the last stage too, in a long run.

    >>> synced_versions_kept(4, num_minibatches=10)
    4
    """
    return stashed_versions_kept(num_ranks, 0, num_minibatches)


def double_buffered_version(num_ranks: int, batch: int, batch_size: int) -> int:
    """Return the version that every stage uses for the microbatches of a batch under 2BW.

    Raises ValueError for batches of fewer than P - 1 microbatches, for which the version before is not there yet.

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
    """Return how many versions each stage holds at most under 2BW in a run of at least 3 batches.

    >>> double_buffered_versions_kept(4)
    2
    """
    return min(2, num_ranks)
