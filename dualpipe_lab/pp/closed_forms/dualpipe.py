"""DualPipe and DualPipeV: one exact form for all costs; the published form is a special case.

Chapter: book/pp/dualpipe.  In: P ranks, M microbatches, the costs of one stage.  Out: exact ticks, or counts.
H ranks lie between an end and the middle: P/2 for DualPipe, all P for DualPipeV; a flow has n = M/2 or M microbatches.

  idle of a rank in the middle   (H - 1) * (t_F + (t_F&B - t_B) + max(t_I - t_W, 0)) + max(0, (H - 1)(t_I - t_F) - t_F)
  makespan                       that + 2 n (t_F + t_B) - (2 n - 2 H - 1) * (t_F + t_B - t_F&B)
  published idle                 (H - 1) * (t_F&B + t_B - 3 t_W): the same where t_F = t_I >= t_W
  live activations               2 H + 1 on every rank: P + 1 for DualPipe, 2 P + 1 half-size ones for DualPipeV
The terms are the fill; step 5, where a B waits for a longer pair of the neighbour; step 7, where W hides a part of the
wait for the next I; and step 3 if I is slow.  Outer ranks have fewer pairs: with a gain, t_F&B < t_F + t_B, they are
idle for a shorter time.  The forms need equal stages, free links, t_B = t_I + t_W, and pairs at least as long as their
longer half.  Under these conditions they hold for any costs: found and checked with the simulator, not proved.
Source of the published form: DeepSeek-AI 2025, github.com/deepseek-ai/DualPipe, README.
"""

from dualpipe_lab.pp.closed_forms.equal_stages import StageTicks, stage_ticks
from dualpipe_lab.pp.cost import UNIT_COST, Cost
from dualpipe_lab.pp.schedules.dualpipe import check_dualpipe
from dualpipe_lab.pp.schedules.dualpipev import check_dualpipev
from dualpipe_lab.timeline import Time


def dualpipe_makespan(num_ranks: int, num_microbatches: int, cost: Cost = UNIT_COST) -> Time:
    """Return DualPipe's makespan; ValueError for unequal stages, slow links, and pairs shorter than F or B.

    >>> dualpipe_makespan(8, 20), dualpipe_makespan(8, 20, Cost(F=2, I=2, W=2, overlap=5))
    (66, 118)
    """
    check_dualpipe(num_ranks, num_microbatches)
    return _makespan(num_ranks // 2, num_microbatches // 2, _ticks(num_ranks, cost))


def dualpipev_makespan(num_ranks: int, num_microbatches: int, cost: Cost = UNIT_COST) -> Time:
    """Return DualPipeV's makespan, for costs of a half-size stage; ValueError as `dualpipe_makespan`.

    >>> dualpipev_makespan(4, 10)
    66
    """
    check_dualpipev(num_ranks, num_microbatches)
    return _makespan(num_ranks, num_microbatches, _ticks(2 * num_ranks, cost))


def dualpipe_bubble(num_ranks: int, num_microbatches: int, rank: int, cost: Cost = UNIT_COST) -> Time:
    """Return the idle time of a rank of DualPipe; ValueError as `dualpipe_makespan`.

    >>> [dualpipe_bubble(8, 20, rank, Cost(overlap=2)) for rank in range(8)]
    [1, 2, 3, 3, 3, 3, 2, 1]
    """
    check_dualpipe(num_ranks, num_microbatches)
    position = min(rank, num_ranks - 1 - rank)
    return _bubble(num_ranks // 2, num_microbatches // 2, position, _ticks(num_ranks, cost))


def dualpipev_bubble(num_ranks: int, num_microbatches: int, rank: int, cost: Cost = UNIT_COST) -> Time:
    """Return the idle time of a rank of DualPipeV, for costs of a half-size stage; ValueError as `dualpipev_makespan`.

    >>> [dualpipev_bubble(4, 10, rank) for rank in range(4)]
    [6, 6, 6, 6]
    """
    check_dualpipev(num_ranks, num_microbatches)
    return _bubble(num_ranks, num_microbatches, rank, _ticks(2 * num_ranks, cost))


def published_dualpipe_bubble(num_stages: int, cost: Cost = UNIT_COST) -> Time:
    """Return the published idle time (P/2 - 1) * (F&B + B - 3W), with P the number of stages, also for DualPipeV.

    The ranks in the middle have it exactly if t_F = t_I >= t_W.  Raises ValueError for other costs.

    >>> published_dualpipe_bubble(8), published_dualpipe_bubble(8, Cost(F=2, I=2, W=1))
    (6, 15)
    """
    ticks = _ticks(num_stages, cost)
    if not ticks.F == ticks.I >= ticks.W:
        raise ValueError(
            f"the published bubble is exact for F = I >= W only, got F={ticks.F}, I={ticks.I}, W={ticks.W}; "
            "use dualpipe_bubble or dualpipev_bubble"
        )
    return (num_stages // 2 - 1) * (ticks.pair + ticks.B - 3 * ticks.W)


def dualpipe_peak_activations(num_ranks: int) -> int:
    """Return the most activations that every rank of DualPipe holds.

    >>> dualpipe_peak_activations(8)
    9
    """
    return num_ranks + 1


def dualpipev_peak_activations(num_ranks: int) -> int:
    """Return the most activations, of half-size stages, that every rank of DualPipeV holds.

    >>> dualpipev_peak_activations(4)
    9
    """
    return 2 * num_ranks + 1


def dualpipev_num_messages(num_ranks: int, num_microbatches: int) -> int:
    """Return DualPipeV's number of messages: activations and gradients pass every link twice.

    DualPipe and Easy-DualPipe have 1F1B's number, `num_messages`.

    >>> dualpipev_num_messages(4, 10)
    120
    """
    return 4 * (num_ranks - 1) * num_microbatches


def _ticks(num_stages: int, cost: Cost) -> StageTicks:
    ticks = stage_ticks("DualPipe", num_stages, cost)
    if ticks.B != ticks.I + ticks.W:
        raise ValueError(
            f"DualPipe's closed forms need B = I + W, got B={ticks.B}, I={ticks.I}, W={ticks.W}; leave B out"
        )
    if ticks.pair < max(ticks.F, ticks.B):
        raise ValueError(
            f"DualPipe's closed forms need a pair to last as long as its longer half, got overlap={ticks.pair} "
            f"for F={ticks.F} and B={ticks.B}; use {max(ticks.F, ticks.B)} or more, or simulate()"
        )
    return ticks


def _middle_bubble(half: int, t: StageTicks) -> Time:
    inside = half - 1
    return inside * (t.F + (t.pair - t.B) + max(t.I - t.W, 0)) + max(0, inside * (t.I - t.F) - t.F)


def _num_pairs(half: int, per_flow: int, position: int) -> int:
    in_the_middle = position == half - 1  # its first pair runs one half after the other
    return 2 * per_flow - 3 * half + position + 1 - in_the_middle


def _makespan(half: int, per_flow: int, t: StageTicks) -> Time:
    return _middle_bubble(half, t) + _busy(half, per_flow, half - 1, t)


def _bubble(half: int, per_flow: int, position: int, t: StageTicks) -> Time:
    return _makespan(half, per_flow, t) - _busy(half, per_flow, position, t)


def _busy(half: int, per_flow: int, position: int, t: StageTicks) -> Time:
    return 2 * per_flow * (t.F + t.B) - _num_pairs(half, per_flow, position) * (t.F + t.B - t.pair)
