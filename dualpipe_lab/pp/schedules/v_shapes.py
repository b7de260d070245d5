"""ZBV, V-Half and V-Min: two half-size stages per rank on a V; rank r has the stages r and 2P-1-r.

Chapter: book/pp/v-shapes.  In: P ranks, M microbatches.  Out: one list of actions per rank.
Times and activations are those of a half-size stage, half as large as 1F1B's.  Messages: as many as DualPipeV has.
All closed forms need equal stages and free links.  They were found and checked with the simulator, not proved, except
for ZBV with equal times.  The published activations, P, (P + 2) // 2 and (P + 4) // 3 full-size stages, are the same.
ZBV's twin with overlapped pairs is DualPipeV, on the same V.
Elsewhere: torch ScheduleZBVZeroBubble, d9d the same; sail-sg `zbv_greedy` with 'half' and 'min', for equal times with
the same idle time and memory at 4 and 8 ranks.
Sources: Qi et al. 2024 (arXiv 2401.10241), section 6, for ZBV; Qi et al. 2024 (arXiv 2405.15362), sections 2 and 3, and
the same authors' playground.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from dualpipe_lab.pp.cost import UNIT_COST, Cost, StageTicks, stage_ticks
from dualpipe_lab.pp.program import Action, F, I, Program, W, check_counts
from dualpipe_lab.pp.schedules.dualpipe import dualpipev_num_messages
from dualpipe_lab.pp.schedules.schedule import Schedule
from dualpipe_lab.timeline import Time

Pick: TypeAlias = tuple[str, int]  # (kind, stage); the microbatch is the stage's next one


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
    # torch drops the missing microbatches and leaves gaps.  Here W fills them: for equal times, 8 ranks and 8
    # microbatches have 7 idle ticks instead of 14.
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


class ScheduleState:
    """Per kind and stage, the number of microbatches that have started and of those whose input is available.

    >>> state = ScheduleState(num_ranks=1, num_microbatches=2)
    >>> str(state.start("F", 0)), state.can("F", 1), state.held(0)
    ('0F0', True, 1)
    """

    def __init__(self, num_ranks: int, num_microbatches: int) -> None:
        self.num_stages = 2 * num_ranks
        self.started = {kind: [0] * self.num_stages for kind in (F, I, W)}
        self.could = {kind: [0] * self.num_stages for kind in (F, I, W)}
        self.could[F][0] = num_microbatches

    def can(self, kind: str, stage: int) -> bool:
        """Whether the stage has an input for its next action of this kind."""
        return self.started[kind][stage] < self.could[kind][stage]

    def held(self, stage: int) -> int:
        """Return the number of microbatches that the stage holds, from F to W."""
        return self.started[F][stage] - self.started[W][stage]

    def stages(self, rank: int) -> tuple[int, int]:
        """Return the two stages of a rank, the later stage first."""
        return self.num_stages - 1 - rank, rank

    def weight_gradient(self, rank: int) -> Pick | None:
        """Return a W that the rank can run, of its later stage first; None if there is none."""
        return next(((W, stage) for stage in self.stages(rank) if self.can(W, stage)), None)

    def start(self, kind: str, stage: int) -> Action:
        """Start the stage's next action of this kind, and make its result available to the next stage."""
        microbatch = self.started[kind][stage]
        self.started[kind][stage] += 1
        if kind == F:
            last = stage == self.num_stages - 1
            self.could[I if last else F][stage if last else stage + 1] += 1
        elif kind == I:
            self.could[W][stage] += 1
            if stage:
                self.could[I][stage - 1] += 1
        return Action(stage, kind, microbatch)


def tick_by_tick(
    num_ranks: int, num_microbatches: int, rule: Callable[[ScheduleState, int], Pick | None], interval: int = 0
) -> list[list[Action]]:
    """Return one row of actions per rank: at every tick, `rule` picks an action for each rank, or None to wait.

    F, I and W take one tick each and messages none.  Only the order of the actions is kept: in a run with other costs,
    a rank starts each action as soon as it can.  Time O(actions), plus one call of the rule per rank and tick.

    `interval`: ticks between the entries of two microbatches into stage 0; 0 if all may enter at once.  ValueError if
    all ranks wait and no microbatch is still to enter: the rule would let them wait forever.
    """
    state = ScheduleState(num_ranks, num_microbatches)
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    left, tick = 6 * num_ranks * num_microbatches, 0
    while left:
        if interval:
            state.could[F][0] = min(num_microbatches, 1 + tick // interval)
        picks = [rule(state, rank) for rank in range(num_ranks)]  # all rules see the same state
        if not any(picks) and state.could[F][0] == num_microbatches:
            raise ValueError(
                f"the rule lets all {num_ranks} ranks wait forever: none starts an action at tick {tick}, {left} are "
                "left and no microbatch is still to enter; let a rank start one that state.can allows"
            )
        for row, pick in zip(rows, picks, strict=True):
            if pick:
                row.append(state.start(*pick))
                left -= 1
        tick += 1
    return rows


INTERVAL = 6  # F, I and W on two stages, one tick each


def repeat_block(
    forwards: Sequence[int], inputs: Sequence[int], num_microbatches: int, limits: Sequence[int] | None = None
) -> list[list[Action]]:
    """Repeat a building block: the ticks at which the first microbatch starts F, and I, on each stage.

    A rank of a V works six ticks per microbatch: F, I and W on either stage.  If the ticks at which a rank starts its
    four F and I differ modulo six, microbatch after microbatch fits without a collision, and W takes the two ticks left
    over.  A stage holds a microbatch for its lifespan, the ticks from its F to its W, and so lifespan / 6 microbatches,
    rounded up.  Elsewhere: `stable_pattern` in sail-sg's zero-bubble-pipeline-parallelism.

    `limits`: the most microbatches that each stage holds, from F to W; without limits one enters every six ticks.

    >>> print([" ".join(map(str, row)) for row in repeat_block([0, 1], [3, 2], 2, limits=[1, 1])])
    ['0F0 1F0 1I0 0I0 1W0 0W0 0F1 1F1 1I1 0I1 1W1 0W1']
    """

    def earliest(now: ScheduleState, rank: int) -> Pick | None:
        wishes: list[tuple[int, Pick]] = []
        for stage in now.stages(rank):
            if now.can(F, stage) and (limits is None or now.held(stage) < limits[stage]):
                wishes.append((forwards[stage] + INTERVAL * now.started[F][stage], (F, stage)))
            if now.can(I, stage):
                wishes.append((inputs[stage] + INTERVAL * now.started[I][stage], (I, stage)))
        return min(wishes)[1] if wishes else now.weight_gradient(rank)

    return tick_by_tick(len(forwards) // 2, num_microbatches, earliest, 0 if limits else INTERVAL)


def v_half(num_ranks: int, num_microbatches: int) -> Program:
    """Build the V-Half program for any number of ranks and microbatches.

    A microbatch takes two ticks per rank on its way down and one on its way up.

    >>> print(v_half(2, 2))
    # V-Half: 2 ranks, 4 stages, 2 microbatches
    rank 0: 0F0 0F1 3F0 3I0 3W0 3F1 0I0 3I1 3W1 0W0 0I1 0W1
    rank 1: 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 2I1 1I1 2W1 1W1
    """
    check_counts("v_half", num_ranks=num_ranks, num_microbatches=num_microbatches)
    num_stages, even = 2 * num_ranks, num_ranks % 2 == 0
    # 1F1B on 2P ranks holds 2P - s microbatches on stage s.  Half of that, rounded up (for even P half of 2P - s + 1),
    # gives the limits of a rank's two stages the same sum on every rank.
    limits = [(num_stages - stage + 1 + even) // 2 for stage in range(num_stages)]
    down, up = range(num_ranks), range(num_ranks, num_stages)
    forwards = [2 * stage for stage in down] + [num_ranks - 1 + stage for stage in up]
    # Without three ticks' pause after the last F, F and I would collide on an even number of ranks.
    turned = forwards[-1] + (4 if even else 1)
    coming_down = [turned + 2 * (num_stages - 1 - stage) for stage in up]
    going_up = [coming_down[0] + 1 + num_ranks - stage for stage in down]
    rows = repeat_block(forwards, going_up + coming_down, num_microbatches, limits)
    return Program("V-Half", rows, num_stages, num_microbatches, num_directions=1)


def v_min(num_ranks: int, num_microbatches: int) -> Program:
    """Build the V-Min program for any number of ranks and microbatches.

    A microbatch never waits: it passes one stage per tick, down and up, and again for I.  All ranks move in lock-step,
    so each of the six ticks takes the time of the longer of F and I.

    >>> print(v_min(2, 2))
    # V-Min: 2 ranks, 4 stages, 2 microbatches
    rank 0: 0F0 3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0I1 0W1
    rank 1: 1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 2W1 1W1
    """
    check_counts("v_min", num_ranks=num_ranks, num_microbatches=num_microbatches)
    num_stages = 2 * num_ranks
    # Without two ticks' pause after the last F, F and I would collide where 3 divides the number of ranks.
    turned = num_stages + (2 if num_ranks % 3 == 0 else 0)
    inputs = [turned + num_stages - 1 - stage for stage in range(num_stages)]
    return Program(
        "V-Min",
        repeat_block(range(num_stages), inputs, num_microbatches),
        num_stages,
        num_microbatches,
        num_directions=1,
    )


def zbv_makespan(num_ranks: int, num_microbatches: int, cost: Cost = UNIT_COST) -> Time:
    """Return ZBV's makespan; ValueError unless F = I = W, or I is the longest and there are 2P - 1 microbatches.

    For F = I = W = t every rank is idle for t * max(P - 1, 3P - 1 - 2M, 4P - 1 - 4M).  No order on this V is shorter:
    the last rank's first F starts at P - 1 and its first I at 3P - 1; before that it has only 2M forwards to run.
    Stage 0 starts its first I at 4P - 1; before that rank 0 has only 4M ticks of other work.

    Otherwise the idle time is (P - 1) * max(t_I, 2 (t_I - t_W)) and the local bubble (P - 1) * max(t_I - t_F,
    2 (t_I - t_W)), which is zero iff F = I = W.

    >>> zbv_makespan(4, 8), zbv_makespan(8, 8), zbv_makespan(4, 8, Cost(F=5, I=6, W=4))
    (51, 55, 258)
    """
    check_counts("zbv_makespan", num_ranks=num_ranks, num_microbatches=num_microbatches)
    ticks = stage_ticks("ZBV", 2 * num_ranks, cost)
    if ticks.F == ticks.I == ticks.W:
        fewer = 3 * num_ranks - 1 - 2 * num_microbatches, 4 * num_ranks - 1 - 4 * num_microbatches
        return _work(num_microbatches, ticks) + ticks.F * max(num_ranks - 1, *fewer)
    if max(ticks.F, ticks.W) > ticks.I or num_microbatches < 2 * num_ranks - 1:
        raise ValueError(
            f"zbv_makespan holds for I >= F, I >= W and at least {2 * num_ranks - 1} microbatches, got F={ticks.F}, "
            f"I={ticks.I}, W={ticks.W} and {num_microbatches}; use simulate()"
        )
    return _work(num_microbatches, ticks) + (num_ranks - 1) * max(ticks.I, 2 * (ticks.I - ticks.W))


def v_half_makespan(num_ranks: int, num_microbatches: int, cost: Cost = UNIT_COST) -> Time:
    """Return V-Half's makespan; ValueError unless F = I = W.

    For F = I = W = t a rank is idle for t * max(P - 1, 3P - 4, 4P - 4 - M) if P is odd and for
    t * max(P - 1, 3P - 7, 4P - 3 - 2M) if it is even; 2t more for even P >= 14 and M > P/2 + 5.

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

    For F = I = W = t every one of P > 1 ranks is idle for t * (4P - 5).

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

    These are max(2 (t_F + t_I + t_W), 4 t_I): the step runs at full speed iff t_I <= t_F + t_W.

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

    These are max(2 (t_F + t_I + t_W), 6 max(t_F, t_I)).

    >>> v_min_ticks_per_microbatch(4), v_min_ticks_per_microbatch(4, Cost(F=2, I=3, W=1))
    (6, 18)
    """
    check_counts("v_min_ticks_per_microbatch", num_ranks=num_ranks)
    ticks = stage_ticks("V-Min", 2 * num_ranks, cost)
    if num_ranks == 2:
        raise ValueError("v_min_ticks_per_microbatch holds for 1 rank and for 3 or more, got 2; use simulate()")
    return max(_work(1, ticks), 6 * max(ticks.F, ticks.I) if num_ranks > 1 else 0)


def zbv_peak_activations(num_ranks: int, num_microbatches: int) -> int:
    """Return the most half-size stages' activations that every rank of ZBV holds, until W: as 1F1B's rank 0.

    >>> zbv_peak_activations(4, 8), zbv_peak_activations(4, 3)
    (8, 6)
    """
    return min(2 * num_microbatches, 2 * num_ranks)


def v_half_peak_activations(num_ranks: int, num_microbatches: int) -> int:
    """Return the most half-size stages' activations that any rank of V-Half holds, until W; all do for M > P.

    That is half of 1F1B's plus one or two.

    >>> v_half_peak_activations(4, 8), v_half_peak_activations(8, 16)
    (6, 10)
    """
    return min(2 * num_microbatches, num_ranks + 1 if num_ranks % 2 else num_ranks + 2)


def v_min_peak_activations(num_ranks: int, num_microbatches: int) -> int:
    """Return the most half-size stages' activations that any rank of V-Min holds, until W.

    That is a third of 1F1B's 2P, plus at most two by rounding.

    >>> v_min_peak_activations(4, 8), v_min_peak_activations(8, 16)
    (4, 8)
    """
    return min(2 * num_microbatches, 2 * ((num_ranks + 4) // 3))


def _work(num_microbatches: int, ticks: StageTicks) -> Time:
    return 2 * num_microbatches * (ticks.F + ticks.I + ticks.W)


SCHEDULES = (
    Schedule("zbv", zbv, zbv_makespan, zbv_peak_activations, dualpipev_num_messages),
    Schedule("v_half", v_half, v_half_makespan, v_half_peak_activations, dualpipev_num_messages),
    Schedule("v_min", v_min, v_min_makespan, v_min_peak_activations, dualpipev_num_messages),
)
