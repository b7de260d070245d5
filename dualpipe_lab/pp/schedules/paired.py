"""Paired twins: 1F1B, interleaved 1F1B and ZB-H1 with each steady forward and backward as one overlapped pair.

Chapter: book/pp/interleaved.  In: P ranks, M microbatches, V stages per rank; stage s on rank s % P.
Out: one list of steps per rank.  Times per stage, which is 1/V of a rank's share of the model.
In 1F1B, on the last rank, each backward needs the forward before it.  One more forward in the warm-up of every rank
makes the two independent, so each forward overlaps with the backward after it.
Interleaved 1F1B has time for this forward.  1F1B has to warm up as interleaved with V = 1 does, with two forwards per
rank below: with one, neighbours would wait for each other's pairs alternately, two pairs per microbatch.
  makespan           ((V - 1) * R + P) * (t_F + t_B) + (V * M - (V - 1) * R - 1) * t_F&B for M >= P, R the size of the
                     first round; for any M and for ZB-H1 see `dualpipe_lab.pp.closed_forms.paired`
  live activations   (V - 1) * R + 2 * (P - rank) stages: interleaved's plus one; for V = 1, twice 1F1B's on rank 0
  weights            every stage once; DualPipe holds each stage twice
  messages           2 * (V * P - 1) * M              as without pairs
ZB-H1's twin splits the backwards outside of the steady phase, where W fills a wait; a pair has a full backward (B).
Schedules without a twin: GPipe and looped breadth-first run no forward after their first backward.  ZB-H2 has the
deeper warm-up of pairs already and uses it against idle time; its twin would be ZB-H1's.  V-Half and V-Min do without
the one activation that pairs need on every rank.  ZBV's twin is DualPipeV, on the same V.
Two forwards per rank below hide no latency: every message delays the pairs on both of its ends.
Elsewhere: Megatron-LM `overlap_moe_expert_parallel_comm`, "one extra micro-batch forward step before the 1f1b stages"
(core/pipeline_parallel/schedules.py at d98e8a64, which needs V > 1); torch OVERLAP_F_B, in ScheduleDualPipeV only.
"""

from dualpipe_lab.pp.program import Program, check_counts
from dualpipe_lab.pp.schedules.interleaved import loop_cells, round_sizes
from dualpipe_lab.pp.schedules.warmup_steady_cooldown import warmup_steady_cooldown


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
    delays r weight gradients to the waits between the last input gradients.

    >>> print(paired_zero_bubble_h1(2, 4))
    # Paired ZB-H1: 2 ranks, 2 stages, 4 microbatches
    rank 0: 0F0 0F1 0F2 (0F3;0B0)OVERLAP_F_B 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1: 1F0 1F1 1I0 (1F2;1B1)OVERLAP_F_B (1F3;1B2)OVERLAP_F_B 1I3 1W0 1W3
    """
    return _paired("paired_zero_bubble_h1", "Paired ZB-H1", num_ranks, num_microbatches, num_virtual_stages, split=True)


def _paired(
    builder: str, name: str, num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1, split: bool = False
) -> Program:
    check_counts(builder, num_ranks=num_ranks, num_microbatches=num_microbatches, num_virtual_stages=num_virtual_stages)
    sizes = round_sizes(num_ranks, num_microbatches)
    ranks = []
    for rank in range(num_ranks):
        cells = loop_cells(rank, num_ranks, sizes, num_virtual_stages)
        num_warmup = (num_virtual_stages - 1) * sizes[0] + 2 * (num_ranks - 1 - rank) + 1
        ranks.append(warmup_steady_cooldown(*cells, num_warmup, weight_delay=rank if split else None, pairs=True))
    return Program(name, ranks, num_virtual_stages * num_ranks, num_microbatches, num_directions=1)
