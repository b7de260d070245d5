"""Interleaved 1F1B: every rank holds V small stages on a loop, and a microbatch passes each rank V times.

Chapter: book/pp/interleaved.  In: P ranks, M microbatches, V stages per rank; stage s on rank s % P.
Out: one list of actions per rank.  Times per stage, which is 1/V of a rank's share of the model.
  makespan           ((V - 1) * max(M, P) + M + P - 1) * (t_F + t_B)
  bubble per rank    (P - 1) * (t_F + t_B) for M >= P: 1/V of 1F1B's
  live activations   (V - 1) * R + 2 * (P - 1 - rank) + 1 stages, R the size of the first round
  messages           2 * (V * P - 1) * M                V times 1F1B's
Microbatches run in rounds.  A round passes all stages of a rank before the next round starts: depth first.  A round of
fewer than P microbatches would wait for its first microbatch to return on the loop.  So there are M // P rounds (at
least one) of nearly equal size, the larger rounds first.  Any M is legal; torch needs a multiple of the number of
rounds.  Larger rounds hold more activations and leave messages more time; a single round is breadth first until the
last stage.  The warm-up has two forwards per rank below, 1F1B's has one: messages then have time to travel, but with
free links one would be enough.  So V = 1 is not 1F1B: equal makespan, up to 2 * P - 1 activations.
Elsewhere: torch ScheduleInterleaved1F1B (the same order wherever torch is legal); Megatron
forward_backward_pipelining_with_interleaving.
Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.
"""

from collections.abc import Sequence

from dualpipe_lab.pp.program import Cell, Program, ProgramStep, check_counts
from dualpipe_lab.pp.schedules.warmup_steady_cooldown import warmup_steady_cooldown


def interleaved(
    num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2, round_size: int | None = None
) -> Program:
    """Build the interleaved 1F1B program for any number of ranks, microbatches and virtual stages.

    `round_size`: the least number of microbatches in a round, at least and by default `num_ranks`; fewer microbatches
    are one round.  Raises ValueError for a smaller `round_size`.

    >>> print(interleaved(2, 2))
    # Interleaved 1F1B: 2 ranks, 4 stages, 2 microbatches
    rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    check_counts(
        "interleaved", num_ranks=num_ranks, num_microbatches=num_microbatches, num_virtual_stages=num_virtual_stages
    )
    sizes = round_sizes(num_ranks, num_microbatches, round_size)
    ranks = [_one_rank(rank, num_ranks, sizes, num_virtual_stages) for rank in range(num_ranks)]
    return Program("Interleaved 1F1B", ranks, num_virtual_stages * num_ranks, num_microbatches, num_directions=1)


def loop_cells(
    rank: int, num_ranks: int, round_sizes: Sequence[int], num_virtual_stages: int
) -> tuple[list[Cell], list[Cell]]:
    """Return the (stage, microbatch) pairs of one rank on a loop, in the order of forwards and of backwards.

    >>> loop_cells(1, num_ranks=2, round_sizes=[2], num_virtual_stages=2)
    ([(1, 0), (1, 1), (3, 0), (3, 1)], [(3, 0), (3, 1), (1, 0), (1, 1)])
    """
    stages = range(rank, num_virtual_stages * num_ranks, num_ranks)
    forwards: list[Cell] = []
    backwards: list[Cell] = []
    done = 0
    for size in round_sizes:
        microbatches = range(done, done + size)
        forwards += [(stage, m) for stage in stages for m in microbatches]
        backwards += [(stage, m) for stage in reversed(stages) for m in microbatches]
        done += size
    return forwards, backwards


def round_sizes(num_ranks: int, num_microbatches: int, round_size: int | None = None) -> list[int]:
    """Return the number of microbatches of each round: at least `round_size`, unless there are fewer in all.

    >>> round_sizes(4, 11), round_sizes(4, 3), round_sizes(4, 20, round_size=7)
    ([6, 5], [3], [10, 10])
    """
    least = num_ranks if round_size is None else round_size
    check_counts("interleaved", round_size=least)
    if least < num_ranks:
        raise ValueError(
            f"interleaved needs round_size to be at least the number of ranks, {num_ranks}, got {least}: a smaller "
            f"round waits for itself to come around the loop; use round_size={num_ranks} or more"
        )
    num_rounds = max(1, num_microbatches // least)
    size, larger = divmod(num_microbatches, num_rounds)
    return [size + 1] * larger + [size] * (num_rounds - larger)


def _one_rank(rank: int, num_ranks: int, sizes: Sequence[int], num_virtual_stages: int) -> list[ProgramStep]:
    forwards, backwards = loop_cells(rank, num_ranks, sizes, num_virtual_stages)
    return warmup_steady_cooldown(forwards, backwards, (num_virtual_stages - 1) * sizes[0] + 2 * (num_ranks - 1 - rank))
