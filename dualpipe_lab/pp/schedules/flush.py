"""GPipe and 1F1B: one stage per rank, a flush at both ends of the step, and equal makespans.

Chapters: book/pp/gpipe, book/pp/one-f-one-b.  In: P ranks, M microbatches.  Out: one list of actions per rank.
GPipe runs all forwards, then all backwards.  1F1B follows every forward after the warm-up by one backward
(PipeDream-flush).
Elsewhere: torch ScheduleGPipe (d9d's gpipe runs its backwards last in, first out); torch Schedule1F1B, which needs
M >= P; Megatron forward_backward_pipelining_without_interleaving.
Sources: Huang et al. 2019 (arXiv 1811.06965), section 2.3; Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.
"""

from fractions import Fraction

from dualpipe_lab.pp.cost import UNIT_COST, Cost
from dualpipe_lab.pp.program import Action, B, F, Program, check_counts
from dualpipe_lab.pp.schedules.schedule import Schedule
from dualpipe_lab.timeline import Time


def gpipe(num_ranks: int, num_microbatches: int) -> Program:
    """Build the GPipe program for any number of ranks and microbatches.

    >>> " ".join(map(str, gpipe(2, 3).ranks[1]))
    '1F0 1F1 1F2 1B0 1B1 1B2'
    """
    check_counts("gpipe", num_ranks=num_ranks, num_microbatches=num_microbatches)
    # Backwards run first in, first out: gradients are summed in the order of the microbatches, as in gradient
    # accumulation on one process, and are bitwise equal to that.
    ranks = [[Action(rank, kind, m) for kind in (F, B) for m in range(num_microbatches)] for rank in range(num_ranks)]
    return Program("GPipe", ranks, num_stages=num_ranks, num_microbatches=num_microbatches, num_directions=1)


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


def gpipe_makespan(num_ranks: int, num_microbatches: int, cost: Cost = UNIT_COST) -> Time:
    """Return GPipe's makespan for any costs per stage and any link.

    The forwards are a flow shop of identical jobs whose machines are the stages and links: the first microbatch passes
    all of them, and every further microbatch ends the slowest machine's time later.  The same holds for the backwards.

    >>> gpipe_makespan(4, 8), gpipe_makespan(2, 3, Cost(F=[1, 4], latency=1))
    (33, 23)
    """
    check_counts("gpipe_makespan", num_ranks=num_ranks, num_microbatches=num_microbatches)
    ticks = cost.per_stage(num_ranks)
    return sum(_flow_shop(ticks[kind], num_microbatches, cost) for kind in ("F", "B"))


def one_f_one_b_makespan(num_ranks: int, num_microbatches: int, cost: Cost = UNIT_COST) -> Time:
    """Return 1F1B's makespan for equal stages and free links; ValueError for other costs, which have no short form.

    It is (M + P - 1) * (t_F + t_B), as GPipe's with equal stages and free links; (P - 1) * (t_F + t_B) are idle.

    >>> one_f_one_b_makespan(4, 8)
    33
    """
    check_counts("one_f_one_b_makespan", num_ranks=num_ranks, num_microbatches=num_microbatches)
    ticks = cost.per_stage(num_ranks)
    if cost.latency or cost.transfer or any(len(set(ticks[kind])) > 1 for kind in ("F", "B")):
        raise ValueError("1F1B has this closed form for equal stages and free links only; use simulate() for others")
    return (num_microbatches + num_ranks - 1) * (ticks["F"][0] + ticks["B"][0])


def bubble_fraction(num_ranks: int, num_microbatches: int) -> Fraction:
    """Return idle time over makespan of GPipe and 1F1B, which does not depend on t_F and t_B.

    It is (P - 1) / (M + P - 1).  Some papers divide by the useful work instead: (P - 1) / M.

    >>> bubble_fraction(4, 8)
    Fraction(3, 11)
    """
    check_counts("bubble_fraction", num_ranks=num_ranks, num_microbatches=num_microbatches)
    return Fraction(num_ranks - 1, num_microbatches + num_ranks - 1)


def gpipe_peak_activations(num_microbatches: int) -> int:
    """Return the most activations that every rank of GPipe holds: those of all microbatches.

    >>> gpipe_peak_activations(8)
    8
    """
    return num_microbatches


def one_f_one_b_peak_activations(num_ranks: int, num_microbatches: int, rank: int) -> int:
    """Return the most activations that one rank of 1F1B holds: one for each rank from it to the last.

    >>> [one_f_one_b_peak_activations(4, 8, rank) for rank in range(4)]
    [4, 3, 2, 1]
    """
    return min(num_ranks - rank, num_microbatches)


def num_messages(num_ranks: int, num_microbatches: int) -> int:
    """Return the number of messages of GPipe and 1F1B: every link carries each activation and each gradient once.

    >>> num_messages(4, 8)
    48
    """
    return 2 * (num_ranks - 1) * num_microbatches


def _flow_shop(ticks: list[Time], num_microbatches: int, cost: Cost) -> Time:
    num_links = len(ticks) - 1
    slowest = max([*ticks, *[cost.transfer] * num_links])
    return sum(ticks) + num_links * (cost.transfer + cost.latency) + (num_microbatches - 1) * slowest


SCHEDULES = (
    Schedule("gpipe", gpipe, gpipe_makespan, gpipe_peak_activations, num_messages),
    Schedule(
        "1f1b", one_f_one_b, one_f_one_b_makespan, one_f_one_b_peak_activations, num_messages, paired="paired_1f1b"
    ),
)
