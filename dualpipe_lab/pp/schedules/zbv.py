"""ZBV: two half-size stages per rank on a V, no idle time inside any rank's work, and 1F1B's memory.

Chapter: book/pp/v-shapes.  In: P ranks, M microbatches; rank r has the stages r and 2P-1-r, half as large as 1F1B's.
Out: one list of actions per rank.  With the times of a half-size stage:
  idle per rank      (P - 1) * max(t_I, 2 * (t_I - t_W)) if t_I >= t_F, t_I >= t_W and M >= 2P - 1
  local bubble       (P - 1) * max(t_I - t_F, 2 * (t_I - t_W)) likewise: zero iff t_F = t_I = t_W
  live activations   min(2M, 2P) half-size ones on every rank, held until W: as 1F1B's rank 0
  messages           4 * (P - 1) * M; the tip of the V, on the last rank, needs none
With 2P - 1 microbatches or more this is torch's order.  With fewer, torch drops the missing microbatches from a larger
schedule; here F and I keep that order, and weight gradients fill the gaps.  For equal times, 8 ranks and 8 microbatches
this gives 7 idle ticks instead of 14; for any M no order on this V is shorter (see the closed forms).
Its twin with overlapped pairs is DualPipeV, on the same V.
Elsewhere: torch ScheduleZBVZeroBubble, d9d the same; V-ZB in Qi et al. 2024 (arXiv 2405.15362).
Source: Qi et al. 2024 (arXiv 2401.10241), section 6.
"""

from collections.abc import Iterable, Iterator, Sequence

from dualpipe_lab.pp.program import Action, F, I, Program, W, check_counts
from dualpipe_lab.pp.schedules.list_scheduling import Pick, ScheduleState, tick_by_tick


def zbv(num_ranks: int, num_microbatches: int) -> Program:
    """Build the ZBV program for any number of ranks and microbatches.

    >>> print(zbv(2, 3))
    # ZBV: 2 ranks, 4 stages, 3 microbatches
    rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    rank 1: 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    check_counts("zbv", num_ranks=num_ranks, num_microbatches=num_microbatches)
    enough = max(2 * num_ranks - 1, num_microbatches)
    rows = [_numbered(_phases(rank, num_ranks, enough), num_microbatches) for rank in range(num_ranks)]
    if num_microbatches < enough:
        rows = _refilled(rows, num_microbatches)
    return Program("ZBV", rows, 2 * num_ranks, num_microbatches, num_directions=1)


def _phases(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Pick]:
    """Yield one rank's work by kind and stage; a stage runs its microbatches in order."""
    down, up = rank, 2 * num_ranks - 1 - rank
    below = num_ranks - 1 - rank  # ranks between this one and the turn
    steady = num_microbatches - (num_ranks + below)  # microbatches that enter after the warm-up
    yield from [(F, down)] * (2 * below + 1)
    yield from [(F, up), (F, down)] * rank
    yield from [(F, up), (I, up), (W, up)] * (below + 1)
    yield from [(F, down), (I, down), (W, down), (F, up), (I, up), (W, up)] * steady
    yield from [(I, down), (W, down), (F, up), (I, up), (W, up)] * below
    yield from [(I, down), (I, up)] * rank
    yield from [(I, down), (W, down)] * (below + 1)
    yield from [(W, up)] * rank + [(W, down)] * rank


def _numbered(picks: Iterable[Pick], num_microbatches: int) -> list[Action]:
    """Number the work of each kind and stage by microbatch; drop work beyond the last microbatch."""
    count: dict[Pick, int] = {}
    row = []
    for kind, stage in picks:
        microbatch = count[kind, stage] = count.get((kind, stage), -1) + 1
        if microbatch < num_microbatches:
            row.append(Action(stage, kind, microbatch))
    return row


def _refilled(rows: Sequence[Sequence[Action]], num_microbatches: int) -> list[list[Action]]:
    """Keep the order of F and I; run W where a rank would wait, or would hold more than 2P activations."""
    orders = [[(kind, stage) for stage, kind, _ in row if kind != W] for row in rows]

    def rule(now: ScheduleState, rank: int) -> Pick | None:
        position = sum(now.started[kind][stage] for stage in now.stages(rank) for kind in (F, I))
        for kind, stage in orders[rank][position : position + 1]:
            allowed = kind == I or sum(map(now.held, now.stages(rank))) < now.num_stages
            if allowed and now.can(kind, stage):
                return kind, stage
        return now.weight_gradient(rank)

    return tick_by_tick(len(rows), num_microbatches, rule)
