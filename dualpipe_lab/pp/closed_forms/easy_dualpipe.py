"""Easy-DualPipe: two pipelines in opposite directions fill a part of each other's idle time.

Chapter: book/pp/easy-dualpipe.  In: P ranks, M microbatches, the costs of one stage.  Out: exact ticks, or counts.

  idle of every rank, M <= P     (P - 2) * max(t_F, t_B) + (P - M) * min(t_F, t_B)
  any M, t_F = t_B               (P - 2 + (-M mod P)) * t_F
  live activations               min(P, M, M/2 + 1 + the distance to the nearer end)
Both need equal stages and free links, and hold for any such costs: checked with the simulator, not proved.  For M > P
with t_F != t_B there is no short form: every further P microbatches add idle time.
"""

from dualpipe_lab.pp.closed_forms.equal_stages import stage_ticks
from dualpipe_lab.pp.cost import UNIT_COST, Cost
from dualpipe_lab.pp.schedules.easy_dualpipe import check_easy_dualpipe
from dualpipe_lab.timeline import Time


def easy_dualpipe_bubble(num_ranks: int, num_microbatches: int, cost: Cost = UNIT_COST) -> Time:
    """Return the idle time of every rank; ValueError if there is no closed form.

    >>> easy_dualpipe_bubble(4, 4), easy_dualpipe_bubble(8, 8), easy_dualpipe_bubble(8, 2)
    (4, 12, 18)
    """
    check_easy_dualpipe(num_ranks, num_microbatches)
    t = stage_ticks("Easy-DualPipe", num_ranks, cost)
    if num_ranks == 2:
        return 0
    if num_microbatches <= num_ranks:
        return (num_ranks - 2) * max(t.F, t.B) + (num_ranks - num_microbatches) * min(t.F, t.B)
    if t.F == t.B:
        return (num_ranks - 2 + -num_microbatches % num_ranks) * t.F
    raise ValueError(
        f"Easy-DualPipe has a closed form for at most one microbatch per rank, or for F = B, got {num_microbatches} "
        f"microbatches for {num_ranks} ranks, F={t.F}, B={t.B}; use simulate()"
    )


def easy_dualpipe_makespan(num_ranks: int, num_microbatches: int, cost: Cost = UNIT_COST) -> Time:
    """Return Easy-DualPipe's makespan; ValueError if there is no closed form.

    >>> easy_dualpipe_makespan(4, 4), easy_dualpipe_makespan(8, 8)
    (16, 36)
    """
    bubble = easy_dualpipe_bubble(num_ranks, num_microbatches, cost)
    t = stage_ticks("Easy-DualPipe", num_ranks, cost)
    return bubble + num_microbatches * (t.F + t.B)


def easy_dualpipe_peak_activations(num_ranks: int, num_microbatches: int, rank: int) -> int:
    """Return the most activations that one rank of Easy-DualPipe holds, on both of its stages together.

    >>> [easy_dualpipe_peak_activations(8, 8, rank) for rank in range(8)]
    [5, 6, 7, 8, 8, 7, 6, 5]
    """
    distance = min(rank, num_ranks - 1 - rank)
    return min(num_ranks, num_microbatches, num_microbatches // 2 + 1 + distance)
