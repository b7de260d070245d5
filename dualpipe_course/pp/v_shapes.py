"""Exercises of "V-shapes": ZBV's and V-Min's numbers, and a V between V-Half and ZBV.

Chapter: book/pp/v-shapes.  The V is judged by the validator and the simulator.
"""

from collections.abc import Sequence

from dualpipe_course.declared import Predict, Puzzle
from dualpipe_course.pp import programs
from dualpipe_course.wrong import Wrong
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.schedules.v_shapes import (
    v_min_makespan,
    v_min_peak_activations,
    v_min_ticks_per_microbatch,
    zbv_makespan,
    zbv_peak_activations,
)
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.timeline import Time

NAMES = ("held by ZBV", "idle with ZBV", "held by V-Min", "idle with V-Min", "one more microbatch")
RANKS, MICROBATCHES, LEAST, ROOM, SLOW = 3, 3, 21, 5, 25  # of the puzzle, F = I = W = 1; V-Min takes 25
_SLIPS: tuple[dict[int, str], ...] = (
    {10: "a full-size stage counts as two half-size ones", 12: "this is V-Half's p + 2"},
    {0: "that is the local bubble; the last rank's first input comes after p - 1 forwards", 18: "half-size ones"},
    {
        9: "2 (p + 4) / 3 is rounded down before it is doubled: whole microbatches",
        10: "this is 1F1B's p in full-size stages, or half of ZBV's; V-Min holds about a third of ZBV's",
        4: "each rank has two stages",
        12: "this is V-Half's p + 2",
    },
    {23: "this is V-Half's 3 p - 7", 39: "4 p - 1 is what rank 0 waits for at the start; some of it is filled"},
    {
        12: "this is the work; V-Min moves in lock-step: a tick of its block is as long as the longer of F and I",
        6: "each rank has two stages, and six ticks in its block",
    },
)


def _two_vs(p: int, f: int, i: int) -> Sequence[Time]:
    held, idle = zbv_peak_activations(p, 30), zbv_makespan(p, 30) - 180
    held_min, idle_min = v_min_peak_activations(p, 30), v_min_makespan(p, 30) - 180
    return held, idle, held_min, idle_min, v_min_ticks_per_microbatch(p, Cost(F=f, I=i, W=1))


def _judge_between(answer: object) -> str:
    program = programs.parse(answer, RANKS, MICROBATCHES, num_stages=2 * RANKS)
    for rank in range(RANKS):
        stages = {*program.stages_of(rank)}
        if stages != {rank, 2 * RANKS - 1 - rank}:
            here = f"rank {rank} works on stages {sorted(stages)}"
            raise Wrong(f"{here}; on a V it has the stages {rank} and {2 * RANKS - 1 - rank}")
    timeline = simulate(program)
    peaks = [timeline.peak_activations(rank) for rank in range(RANKS)]
    quick = max(0, SLOW - max(timeline.makespan, LEAST)) / (SLOW - LEAST)
    if timeline.makespan > LEAST:
        late = f"valid, {timeline.makespan} ticks with {max(peaks)} activations; {LEAST} are enough with {ROOM}"
        score = round((0.9 if max(peaks) <= ROOM else 0.45) * quick, 2)
        raise Wrong(f"{late}. Rank 2 is idle for {timeline.bubble_time(2)}", score=score, picture=timeline)
    if max(peaks) > ROOM:
        worst = peaks.index(max(peaks))
        held = f"{timeline.makespan} ticks, but rank {worst} holds {peaks[worst]} activations"
        raise Wrong(f"{held}; there is room for {ROOM}", score=0.5, picture=timeline)
    return f"{LEAST} ticks with {max(peaks)} activations; no order with room for {ROOM} is quicker"


numbers = Predict(
    "v_shapes-1",
    "Two V shapes, counted",
    NAMES,
    _two_vs,
    "V-Min on {p} ranks",
    "Then F takes {f} ticks, I takes {i} and",
    minutes=10,
    points=2,
    hints=(
        "What would have to happen before the last rank can do anything at all? ZBV waits for this and nothing else.",
        "A life on stage i is 2 (2 p - i) + 1 ticks; add the two of a rank and divide by the 6 ticks between "
        "microbatches. Then look up how V-Min rounds.",
        "V-Min's block has six ticks, and with omega = 6 each of them takes as long as the longer of F and I.",
    ),
    slips=_SLIPS,
    p=(10, 7, 8, 9, 11, 12, 13, 14),
    f=(2, 3, 4),
    i=(3, 4, 5),
    called={"p": "ranks", "f": "F", "i": "I"},
)

between = Puzzle(
    "v_shapes-2",
    "Between two schedules",
    "Find a V for 3 ranks and 3 microbatches: 21 ticks, at most 5 half-size activations per rank.",
    judge=_judge_between,
    minutes=40,
    points=3,
    hints=(
        "21 ticks leave 3 idle ones per rank. The last rank waits 2 ticks for its first input; what else can it spare?",
        "Print ZBV's rows for 3 ranks and 3 microbatches, and see which rank holds 6 and when. A W that is done "
        "earlier makes room.",
        "Rank 0 can begin 0F0 0F1 0F2 5F0 5I0 5W0 5F1 5I1; rank 2 delays its W until it would otherwise be idle.",
    ),
)
