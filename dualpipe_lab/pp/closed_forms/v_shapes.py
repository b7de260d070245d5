"""ZBV, V-Half and V-Min: idle time and live activations, in ticks of a half-size stage.

Chapter: book/pp/v-shapes.  In: P ranks, M microbatches, the costs of one half-size stage.  Out: exact ticks, or counts.

  idle per rank, t_F = t_I = t_W = t, any M
    ZBV      t * max(P - 1, 3P - 1 - 2M, 4P - 1 - 4M)
    V-Half   t * max(P - 1, 3P - 4, 4P - 4 - M) for odd P
             t * max(P - 1, 3P - 7, 4P - 3 - 2M) for even P; 2t more for P >= 14 and M > P/2 + 5
    V-Min    t * (4P - 5)
  live activations, the most that any rank holds
    ZBV      min(2M, 2P)
    V-Half   min(2M, P + 1) for odd P, min(2M, P + 2) for even P
    V-Min    min(2M, 2 * ((P + 4) // 3))
  unequal work
    ZBV      idle (P - 1) * max(t_I, 2 (t_I - t_W)), local bubble (P - 1) * max(t_I - t_F, 2 (t_I - t_W)), if t_I is the
             longest and M >= 2P - 1
    V-Half   a long step takes max(2 (t_F + t_I + t_W), 4 t_I) per microbatch, if t_I >= t_F
    V-Min    max(2 (t_F + t_I + t_W), 6 max(t_F, t_I)); the full step is known if t_W is the shortest
Published: no bubble for ZBV, activations of P, (P + 2) // 2 and (P + 4) // 3 full-size stages: the same as here.
All forms need equal stages and free links.  They were found and checked with the simulator, not proved, except for one:
with equal times no order on this V is shorter than ZBV.  The last rank's first F starts at P - 1 and its first I at
3P - 1; before that it has only 2M forwards to run.  Stage 0 starts its first I at 4P - 1; before that rank 0 has only
4M ticks of other work.
Source: Qi et al. 2024 (arXiv 2405.15362), section 3, and the same authors' playground, for the published ones.
"""

from dualpipe_lab.pp.closed_forms.equal_stages import StageTicks, stage_ticks
from dualpipe_lab.pp.cost import UNIT_COST, Cost
from dualpipe_lab.pp.program import check_counts
from dualpipe_lab.timeline import Time


def zbv_makespan(num_ranks: int, num_microbatches: int, cost: Cost = UNIT_COST) -> Time:
    """Return ZBV's makespan; ValueError unless F = I = W, or I is the longest and there are 2P - 1 microbatches.

    >>> zbv_makespan(4, 8), zbv_makespan(8, 8), zbv_makespan(4, 8, Cost(F=5, I=6, W=4))
    (51, 55, 258)
    """
    check_counts("zbv_makespan", num_ranks=num_ranks, num_microbatches=num_microbatches)
    ticks = stage_ticks("ZBV", 2 * num_ranks, cost)
    if ticks.F == ticks.I == ticks.W:
        fewer = 3 * num_ranks - 1 - 2 * num_microbatches, 4 * num_ranks - 1 - 4 * num_microbatches
        return _work(num_microbatches, ticks) + ticks.F * max(num_ranks - 1, *fewer)
    _check_long_input_gradient("zbv_makespan", num_ranks, num_microbatches, ticks)
    return _work(num_microbatches, ticks) + (num_ranks - 1) * max(ticks.I, 2 * (ticks.I - ticks.W))


def zbv_local_bubble(num_ranks: int, num_microbatches: int, cost: Cost = UNIT_COST) -> Time:
    """Return ZBV's longest local bubble; ValueError unless I is the longest and there are 2P - 1 microbatches.

    >>> zbv_local_bubble(4, 8), zbv_local_bubble(4, 8, Cost(F=5, I=6, W=4))
    (0, 12)
    """
    check_counts("zbv_local_bubble", num_ranks=num_ranks, num_microbatches=num_microbatches)
    ticks = stage_ticks("ZBV", 2 * num_ranks, cost)
    _check_long_input_gradient("zbv_local_bubble", num_ranks, num_microbatches, ticks)
    return (num_ranks - 1) * max(ticks.I - ticks.F, 2 * (ticks.I - ticks.W))


def v_half_makespan(num_ranks: int, num_microbatches: int, cost: Cost = UNIT_COST) -> Time:
    """Return V-Half's makespan; ValueError unless F = I = W.

    >>> v_half_makespan(4, 8), v_half_makespan(8, 16), v_half_makespan(5, 2)
    (53, 113, 26)
    """
    check_counts("v_half_makespan", num_ranks=num_ranks, num_microbatches=num_microbatches)
    ticks = stage_ticks("V-Half", 2 * num_ranks, cost)
    if not ticks.F == ticks.I == ticks.W:
        raise ValueError(
            f"v_half_makespan holds for F = I = W, got {ticks.F}, {ticks.I} and {ticks.W}; "
            "use v_half_ticks_per_microbatch for the middle of the step, or simulate()"
        )
    if num_ranks % 2:
        idle = max(3 * num_ranks - 4, 4 * num_ranks - 4 - num_microbatches)
    else:
        long = 2 if num_ranks >= 14 and num_microbatches > num_ranks // 2 + 5 else 0
        idle = max(3 * num_ranks - 7 + long, 4 * num_ranks - 3 - 2 * num_microbatches)
    return _work(num_microbatches, ticks) + ticks.F * max(num_ranks - 1, idle)


def v_min_makespan(num_ranks: int, num_microbatches: int, cost: Cost = UNIT_COST) -> Time:
    """Return V-Min's makespan; ValueError if there is no closed form.

    The form needs W not longer than F and I; and either F = I, or 4 ranks or more in a number that 3 does not divide.

    >>> v_min_makespan(4, 8), v_min_makespan(8, 16), v_min_makespan(4, 24, Cost(F=2, I=3, W=1))
    (59, 123, 455)
    """
    check_counts("v_min_makespan", num_ranks=num_ranks, num_microbatches=num_microbatches)
    ticks = stage_ticks("V-Min", 2 * num_ranks, cost)
    if num_ranks == 1:
        return _work(num_microbatches, ticks)
    collides = num_ranks < 4 or num_ranks % 3 == 0
    if min(ticks.F, ticks.I) < ticks.W or (ticks.F != ticks.I and collides):
        raise ValueError(
            "v_min_makespan holds for W <= F = I, and for W <= min(F, I) on 4, 5, 7, 8, 10, ... ranks, "
            f"got F={ticks.F}, I={ticks.I}, W={ticks.W} on {num_ranks} ranks; use simulate()"
        )
    first = 2 * num_ranks * (ticks.F + ticks.I) + ticks.W
    return first + (num_microbatches - 1) * 6 * max(ticks.F, ticks.I)


def v_half_ticks_per_microbatch(num_ranks: int, cost: Cost = UNIT_COST) -> Time:
    """Return the ticks that one more microbatch adds to a long step of V-Half; ValueError unless I >= F.

    >>> v_half_ticks_per_microbatch(4), v_half_ticks_per_microbatch(4, Cost(F=2, I=5, W=1))
    (6, 20)
    """
    check_counts("v_half_ticks_per_microbatch", num_ranks=num_ranks)
    ticks = stage_ticks("V-Half", 2 * num_ranks, cost)
    if ticks.I < ticks.F:
        raise ValueError(
            f"v_half_ticks_per_microbatch holds for I >= F, got F={ticks.F} and I={ticks.I}; use simulate()"
        )
    return max(_work(1, ticks), 4 * ticks.I if num_ranks > 1 else 0)


def v_min_ticks_per_microbatch(num_ranks: int, cost: Cost = UNIT_COST) -> Time:
    """Return the ticks that one more microbatch adds to a long step of V-Min; ValueError on 2 ranks.

    >>> v_min_ticks_per_microbatch(4), v_min_ticks_per_microbatch(4, Cost(F=2, I=3, W=1))
    (6, 18)
    """
    check_counts("v_min_ticks_per_microbatch", num_ranks=num_ranks)
    ticks = stage_ticks("V-Min", 2 * num_ranks, cost)
    if num_ranks == 2:
        raise ValueError("v_min_ticks_per_microbatch holds for 1 rank and for 3 or more, got 2; use simulate()")
    return max(_work(1, ticks), 6 * max(ticks.F, ticks.I) if num_ranks > 1 else 0)


def zbv_peak_activations(num_ranks: int, num_microbatches: int) -> int:
    """Return the most half-size stages' activations that every rank of ZBV holds, until W.

    >>> zbv_peak_activations(4, 8), zbv_peak_activations(4, 3)
    (8, 6)
    """
    return min(2 * num_microbatches, 2 * num_ranks)


def v_half_peak_activations(num_ranks: int, num_microbatches: int) -> int:
    """Return the most half-size stages' activations that any rank of V-Half holds, until W; all do for M > P.

    >>> v_half_peak_activations(4, 8), v_half_peak_activations(8, 16)
    (6, 10)
    """
    return min(2 * num_microbatches, num_ranks + 1 if num_ranks % 2 else num_ranks + 2)


def v_min_peak_activations(num_ranks: int, num_microbatches: int) -> int:
    """Return the most half-size stages' activations that any rank of V-Min holds, until W.

    >>> v_min_peak_activations(4, 8), v_min_peak_activations(8, 16)
    (4, 8)
    """
    return min(2 * num_microbatches, 2 * ((num_ranks + 4) // 3))


def _work(num_microbatches: int, ticks: StageTicks) -> Time:
    return 2 * num_microbatches * (ticks.F + ticks.I + ticks.W)


def _check_long_input_gradient(form: str, num_ranks: int, num_microbatches: int, ticks: StageTicks) -> None:
    if max(ticks.F, ticks.W) > ticks.I or num_microbatches < 2 * num_ranks - 1:
        raise ValueError(
            f"{form} holds for I >= F, I >= W and at least {2 * num_ranks - 1} microbatches, got F={ticks.F}, "
            f"I={ticks.I}, W={ticks.W} and {num_microbatches}; use simulate()"
        )
