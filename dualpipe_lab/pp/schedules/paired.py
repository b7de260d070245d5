"""Paired twins: 1F1B, interleaved 1F1B and ZB-H1 with each steady forward and backward as one overlapped pair.

Chapter: book/pp/interleaved.  In: P ranks, M microbatches, V stages per rank; stage s on rank s % P.
Out: one list of steps per rank.  Times per stage, which is 1/V of a rank's share of the model.
Schedules without a twin: GPipe and looped breadth-first run no forward after their first backward.  ZB-H2 has the
deeper warm-up of pairs already and uses it against idle time; its twin would be ZB-H1's.  V-Half and V-Min do without
the one activation that pairs need on every rank.  ZBV's twin is DualPipeV, on the same V.
Closed forms need equal stages, free links, and pairs at least as long as their longer half.  They hold for any such
costs, also for pairs without a gain: found and checked with the simulator, not proved.
Elsewhere: Megatron-LM `overlap_moe_expert_parallel_comm`, "one extra micro-batch forward step before the 1f1b stages"
(core/pipeline_parallel/schedules.py at d98e8a64, which needs V > 1); torch OVERLAP_F_B, in ScheduleDualPipeV only.
"""

from dualpipe_lab.pp.cost import UNIT_COST, Cost, StageTicks, stage_ticks
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.schedules.flush import num_messages
from dualpipe_lab.pp.schedules.looped import (
    check_loop,
    loop_cells,
    looped_num_messages,
    round_sizes,
    warmup_steady_cooldown,
)
from dualpipe_lab.pp.schedules.schedule import Schedule
from dualpipe_lab.timeline import Time


def paired_one_f_one_b(num_ranks: int, num_microbatches: int) -> Program:
    """Build 1F1B with overlapped pairs, for any number of ranks and microbatches.

    >>> print(paired_one_f_one_b(2, 4))
    # Paired 1F1B: 2 ranks, 2 stages, 4 microbatches
    rank 0: 0F0 0F1 0F2 (0F3;0B0)OVERLAP_F_B 0B1 0B2 0B3
    rank 1: 1F0 (1F1;1B0)OVERLAP_F_B (1F2;1B1)OVERLAP_F_B (1F3;1B2)OVERLAP_F_B 1B3
    """
    return _paired("paired_one_f_one_b", "Paired 1F1B", num_ranks, num_microbatches)


def paired_interleaved(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2) -> Program:
    """Build interleaved 1F1B with overlapped pairs, for any number of ranks, microbatches and virtual stages.

    >>> print(paired_interleaved(2, 2))
    # Paired interleaved 1F1B: 2 ranks, 4 stages, 2 microbatches
    rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    rank 1: 1F0 1F1 3F0 (3F1;3B0)OVERLAP_F_B 3B1 1B0 1B1
    """
    return _paired("paired_interleaved", "Paired interleaved 1F1B", num_ranks, num_microbatches, num_virtual_stages)


def paired_zero_bubble_h1(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1) -> Program:
    """Build ZB-H1 with overlapped pairs, for any number of ranks, microbatches and virtual stages.

    Rank r runs its first r forwards and input gradients one after the other, so that gradients reach rank 0 sooner.  It
    delays r weight gradients to the waits between the last input gradients.  A pair has a full backward (B).

    >>> print(paired_zero_bubble_h1(2, 4))
    # Paired ZB-H1: 2 ranks, 2 stages, 4 microbatches
    rank 0: 0F0 0F1 0F2 (0F3;0B0)OVERLAP_F_B 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1: 1F0 1F1 1I0 (1F2;1B1)OVERLAP_F_B (1F3;1B2)OVERLAP_F_B 1I3 1W0 1W3
    """
    return _paired("paired_zero_bubble_h1", "Paired ZB-H1", num_ranks, num_microbatches, num_virtual_stages, split=True)


def _paired(
    builder: str, name: str, num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1, split: bool = False
) -> Program:
    """Build a twin; R is the size of the first round, L = (V - 1) * R the forwards of all but the last lap.

    Rank r has V * M - L - 2 * (P - 1 - r) - 1 pairs, ZB-H1 r less, but never less than 0.  Its bubble is
    makespan - V * M * (t_F + t_B) + pairs * (t_F + t_B - t_F&B).  It holds min(V * M, L + 2 * (P - r)) stages'
    activations, ZB-H1 min(V * M, L + 2 * P - r).  There are as many messages as without pairs.
    """
    check_loop(builder, num_ranks, num_microbatches, num_virtual_stages)
    sizes = round_sizes(num_ranks, num_microbatches)
    ranks = []
    for rank in range(num_ranks):
        cells = loop_cells(rank, num_ranks, sizes, num_virtual_stages)
        # On the last rank of 1F1B each backward needs the forward before it; one more forward in every warm-up makes
        # the two independent.  With one forward per rank below instead of two, neighbours would wait for each other's
        # pairs alternately, two pairs per microbatch.  Two hide no latency: a message delays the pairs on both ends.
        num_warmup = (num_virtual_stages - 1) * sizes[0] + 2 * (num_ranks - 1 - rank) + 1
        ranks.append(warmup_steady_cooldown(*cells, num_warmup, weight_delay=rank if split else None, pairs=True))
    return Program(name, ranks, num_virtual_stages * num_ranks, num_microbatches, num_directions=1)


def paired_one_f_one_b_makespan(num_ranks: int, num_microbatches: int, cost: Cost = UNIT_COST) -> Time:
    """Return paired 1F1B's makespan; ValueError for unequal stages, slow links, and pairs shorter than F or B.

    >>> paired_one_f_one_b_makespan(8, 24), paired_one_f_one_b_makespan(8, 24, Cost(F=2, I=2, W=2, overlap=5))
    (93, 163)
    """
    return paired_interleaved_makespan(num_ranks, num_microbatches, 1, cost)


def paired_interleaved_makespan(
    num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2, cost: Cost = UNIT_COST
) -> Time:
    """Return paired interleaved 1F1B's makespan; ValueError as `paired_one_f_one_b_makespan`.

    With L = (V - 1) * R, R the size of the first round, for any M:
    (max(L, (V - 1) * P) + P) * (t_F + t_B) + (V * M - L - 1) * t_F&B.

    Stages of a quarter of a rank's share, times in eighths: 68.375 where F, I and W of a share take 1 and a pair 2.5.

    >>> paired_interleaved_makespan(8, 24, 4, Cost(F=2, I=2, W=2, overlap=5)) / 8
    68.375
    """
    t = _ticks("paired_interleaved", num_ranks, num_microbatches, num_virtual_stages, cost)
    lap = _lap(num_ranks, num_microbatches, num_virtual_stages)
    apart = max(lap, (num_virtual_stages - 1) * num_ranks) + num_ranks
    return apart * (t.F + t.B) + (num_virtual_stages * num_microbatches - lap - 1) * t.pair


def paired_zero_bubble_h1_makespan(
    num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1, cost: Cost = UNIT_COST
) -> Time:
    """Return paired ZB-H1's makespan; ValueError for too few microbatches, and for other costs.

    It holds for t_B = t_I + t_W and M >= 2 P, for V = 1 M >= 3 P - 4.  With L as in paired interleaved 1F1B:
    (L + 2 P - 1) * t_F + (L + P + 1) * t_I + (L + 2) * t_W + (V * M - L - P) * t_F&B
    + (P - 2) * max(t_I, t_W, 2 t_B - t_F&B).

    >>> paired_zero_bubble_h1_makespan(8, 24, 4, Cost(F=2, I=2, W=2, overlap=5)) / 8
    66.75
    """
    t = _ticks("paired_zero_bubble_h1", num_ranks, num_microbatches, num_virtual_stages, cost)
    if t.B != t.I + t.W:
        raise ValueError(f"paired_zero_bubble_h1_makespan needs B = I + W, got B={t.B}, I={t.I}, W={t.W}; leave B out")
    if num_ranks == 1:
        return paired_interleaved_makespan(1, num_microbatches, num_virtual_stages, cost)
    needed = 2 * num_ranks if num_virtual_stages > 1 else 3 * num_ranks - 4
    if num_microbatches < needed:
        raise ValueError(
            f"paired_zero_bubble_h1_makespan holds for at least {needed} microbatches on {num_ranks} ranks with "
            f"{num_virtual_stages} stages each, got {num_microbatches}; use simulate()"
        )
    lap = _lap(num_ranks, num_microbatches, num_virtual_stages)
    apart = (lap + 2 * num_ranks - 1) * t.F + (lap + num_ranks + 1) * t.I + (lap + 2) * t.W
    paired = (num_virtual_stages * num_microbatches - lap - num_ranks) * t.pair
    return apart + paired + (num_ranks - 2) * max(t.I, t.W, 2 * t.B - t.pair)


def _lap(num_ranks: int, num_microbatches: int, num_virtual_stages: int) -> int:
    return (num_virtual_stages - 1) * round_sizes(num_ranks, num_microbatches)[0]


def _ticks(schedule: str, num_ranks: int, num_microbatches: int, num_virtual_stages: int, cost: Cost) -> StageTicks:
    check_loop(schedule, num_ranks, num_microbatches, num_virtual_stages)
    ticks = stage_ticks(schedule, num_virtual_stages * num_ranks, cost)
    if ticks.pair < max(ticks.F, ticks.B):
        raise ValueError(
            f"{schedule} has a closed form for pairs that last as long as their longer half, got overlap={ticks.pair} "
            f"for F={ticks.F} and B={ticks.B}; use {max(ticks.F, ticks.B)} or more, or simulate()"
        )
    return ticks


SCHEDULES = (
    Schedule("paired_1f1b", paired_one_f_one_b, paired_one_f_one_b_makespan, messages=num_messages),
    Schedule("paired_interleaved", paired_interleaved, paired_interleaved_makespan, messages=looped_num_messages),
    Schedule(
        "paired_zero_bubble_h1", paired_zero_bubble_h1, paired_zero_bubble_h1_makespan, messages=looped_num_messages
    ),
)
