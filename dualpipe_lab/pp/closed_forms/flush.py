"""GPipe and 1F1B: a flush at both ends of the step, and equal makespans.

Chapter: book/pp/gpipe, book/pp/one-f-one-b.  In: P ranks, M microbatches, costs.  Out: exact ticks, or counts.

  GPipe and 1F1B, equal stages, free links     makespan  (M + P - 1) * (t_F + t_B)
                                               bubble    (P - 1) * (t_F + t_B) on every rank
                                               fraction  (P - 1) / (M + P - 1) of the makespan; some papers divide by
                                                         the useful work instead: (P - 1) / M
  live activations                             GPipe M on every rank, 1F1B min(P - rank, M)
Sources: Huang et al. 2019 (arXiv 1811.06965), section 2.3; Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.
"""

from fractions import Fraction

from dualpipe_lab.pp.cost import UNIT_COST, Cost
from dualpipe_lab.pp.program import check_counts
from dualpipe_lab.timeline import Time


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
