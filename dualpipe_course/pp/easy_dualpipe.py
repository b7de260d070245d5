"""Exercises of "Easy-DualPipe": its numbers, its slots without a choice, the sum over mirrors.

Chapter: book/pp/easy-dualpipe.  Slots are judged action by action and against the library's own order, gradients
against one process in float64, waiting by the virtual clock.
"""

from collections.abc import Callable
from itertools import pairwise, product
from typing import Any, NamedTuple

from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.pp import mirrors
from dualpipe_course.pp.gradients import without_library
from dualpipe_course.trial import call_each, ended
from dualpipe_course.wrong import Wrong
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import Action, B, F, Program
from dualpipe_lab.pp.schedules.easy_dualpipe import easy_dualpipe
from dualpipe_lab.pp.simulator import simulate

NUMBERS = ("bubble per rank", "makespan", "peak of rank 0", "peak of rank 2")
LARGE = (512, 100_000)  # more actions than anybody could walk through
SECONDS_OF_COMPUTING = 1
SIZES = sorted(((p, m) for p in (2, 4, 6, 8) for m in range(2, 2 * p + 3, 2)), key=lambda size: (sum(size), size))
_BUBBLES = {
    12: "this is (p - 2) max(t_F, t_B), for m = p; two microbatches fewer leave gaps in the middle, (p - m) min each",
    25: "this is 1F1B's (p - 1)(t_F + t_B); here a first input passes half of the ranks",
    20: "(p - 2)(t_F + t_B) counts the way of a first input and of a last gradient twice",
    18: "each missing microbatch leaves a gap as long as the shorter of F and B, not the longer",
}


class _EveryAction:
    """Asks the learner's function for every action of a size."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, p: int, m: int) -> dict[Action, Any]:
        """Return the slot of every action."""
        return {Action(s, k, i): self.fn(p, m, s, k, i) for s, k, i in product(range(p), (F, B), range(m))}


def _check_formula(fn: Callable[..., Any]) -> None:
    """Raise `Wrong` unless a few slots of a large size come at once, as those of a formula do."""
    p, m = LARGE
    case, ways = f"{p} ranks, {m} microbatches", [(F, stage) for stage in (0, 1, p // 2, p - 1)]
    ways += [(B, stage) for _, stage in reversed(ways)]
    asked = [[(p, m, stage, kind, i) for kind, stage in ways] for i in (m - 1, m // 2 - 1, 0)]
    [(fine, slots)] = call_each(without_library(_AtOnce(fn)), [(asked,)])
    if not fine:
        raise Wrong(ended(case, slots))
    for calls, found in zip(asked, slots, strict=True):
        apart = [abs(b[2] - a[2]) + (b[3] != a[3]) for a, b in pairwise(calls)]
        if any(b - a < least for (a, b), least in zip(pairwise(found), apart, strict=True)):
            raise Wrong(
                f"{case}: a microbatch passes stages 0, 1, {p // 2} and {p - 1} and comes back in slots {found}"
            )


class _AtOnce:
    """Asks the learner's function for a few slots, with little time to think; a loaded machine takes none of it."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, asked: list[list[tuple[Any, ...]]]) -> list[list[Any]]:
        """Return the slots."""
        import signal

        signal.signal(signal.SIGVTALRM, self._late)
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS_OF_COMPUTING)
        try:
            return [[self.fn(*each) for each in calls] for calls in asked]
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    @staticmethod
    def _late(*details: Any) -> None:
        raise TimeoutError(f"{SECONDS_OF_COMPUTING} s of computing for 24 slots; a formula looks at no other action")


class _Place(NamedTuple):
    rank: int
    slot: int


def _check_slots(found: dict[Action, Any], p: int, m: int, case: str) -> None:
    taken: dict[_Place, Action] = {}
    for action, slot in found.items():
        if type(slot) is not int or slot < 0:
            raise Wrong(f"{case}: the slot of {action} is {slot!r}, {type(slot).__name__}; expected int from 0")
        place = _Place(action.stage if action.microbatch < m // 2 else p - 1 - action.stage, slot)
        if place in taken:
            raise Wrong(f"{case}: rank {place.rank} has both {taken[place]} and {action} in slot {slot}")
        taken[place] = action
    for action, slot in found.items():
        needs = _input_of(action, p)
        if needs is not None and found[needs] >= slot:
            raise Wrong(f"{case}: {action} is in slot {slot}, but its input is made by {needs} in slot {found[needs]}")
    order = sorted((slot, rank) for rank, slot in taken)
    rows: list[list[Action]] = [[] for _ in range(p)]
    for slot, rank in order:
        rows[rank].append(taken[_Place(rank, slot)])
    timeline = simulate(Program("yours", rows, num_stages=p, num_microbatches=m), Cost(F=1, B=1))
    allowed = simulate(easy_dualpipe(p, m), Cost(F=1, B=1)).makespan
    if order[-1][0] >= allowed:
        where = "within the first group of p microbatches" if m <= p else "where one group of p follows another"
        raise Wrong(
            f"{case}: the last slot is {order[-1][0]}, the rule's order ends with slot {allowed - 1}; look {where}",
            picture=timeline,
        )
    if (peak := max(map(timeline.peak_activations, range(p)))) > p:
        raise Wrong(f"{case}: a rank holds {peak} activations, {p} are enough", picture=timeline)


def _input_of(action: Action, p: int) -> Action | None:
    stage, kind, i = action
    if kind == F:
        return Action(stage - 1, F, i) if stage else None
    return Action(stage + 1, B, i) if stage < p - 1 else Action(stage, F, i)


def _judge_slots(fn: Callable[..., Any]) -> str:
    results = call_each(without_library(_EveryAction(fn)), SIZES)
    for (p, m), (fine, value) in zip(SIZES, results, strict=True):
        case = f"{p} ranks, {m} microbatches"
        if not fine:
            raise Wrong(ended(case, value))
        _check_slots(value, p, m, case)
    _check_formula(fn)
    return f"{len(SIZES)} sizes: no rank does two things at once, no input is late, and no slot more than by the rule"


numbers = Predict(
    "easy_dualpipe-1",
    "Fewer microbatches than ranks",
    NUMBERS,
    lambda p, m, f, b: (wait := (p - 2) * b + (p - m) * f, m * (f + b) + wait, m // 2 + 1, m),
    "on {p} ranks with {m} microbatches; F takes {f} ticks, B takes {b},",
    minutes=5,
    points=1,
    hints=(
        "At m = p a rank waits (p - 2) max(t_F, t_B). What is added where m is smaller?",
        "Every rank works on all m microbatches, half of them on each of its two stages.",
        "Each direction alone is 1F1B with m/2 microbatches: on p - s ranks to its end, stage s holds min(p - s, m/2).",
    ),
    slips=(_BUBBLES, {}, {2: "it holds min(6, 2) of direction 0 on stage 0; and of direction 1, stage 5?"}, {}),
    p=(6, 8, 10),
    m=(4,),
    f=(2, 3),
    b=(3, 4, 5, 6, 7),
    called={"p": "ranks", "m": "microbatches", "f": "F", "b": "B"},
)

slots = Implement(
    "easy_dualpipe-2",
    "Slots without a choice",
    "Write `slot(num_ranks, num_microbatches, stage, kind, microbatch)`: when an action runs, by a formula.",
    judge=_judge_slots,
    minutes=35,
    points=3,
    hints=(
        "Write the rows of by_the_rule(4, 4) into slots, each action as early as it can run. How many slots apart does "
        "the last stage run the forwards of microbatches 0 and 1?",
        "Direction 0 uses slots of one parity for F on a rank, direction 1 those of the other. Let microbatches enter "
        "2 slots apart; when is the backward at stage s, if it follows the last forward at once?",
        "More than p microbatches come in groups of p, half from each end. A group takes 2 p slots of a rank, so the "
        "next one follows 2 p slots later.",
    ),
)


mirror_sum = Repair(
    "easy_dualpipe-4",
    "Half a gradient",
    "Repair `sum_copies(rank, world_size, stages)`: both copies of a stage need the gradient of all microbatches.",
    cases=((2, 2), (4, 2), (4, 6)),
    judge=mirrors.check_mirror_sum,
    right="2 and 4 ranks: both copies of every stage have the gradient of one process, for two stages' bytes",
    minutes=10,
    points=2,
    hints=(
        "Compare the gradient of a stage with that of one process: what is their ratio?",
        "Two copies of data parallelism each have a mean, so their mean is right. What has each mirror here?",
        "`stages` lists a rank's own stage first. Print list(stages) on two mirrors: which stage meets which?",
    ),
)
