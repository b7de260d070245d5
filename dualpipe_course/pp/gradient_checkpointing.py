"""Exercises of "Gradient checkpointing": where to cut, a recomputation of one's own, what to forget, a stream of masks.

Chapter: book/pp/gradient-checkpointing.  What is kept is counted by autograd's own hooks, gradients are compared with
a run that keeps everything, bitwise.
"""

from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any

from dualpipe_course import check as checks
from dualpipe_course.exercise import Wrong, exercise, hint_of
from dualpipe_course.pp import recomputing
from dualpipe_course.trial import needs_function, needs_ints, on_ranks, partial_score

NUMBERS = ("kept for segments of 3", "peak for segments of 3", "best length")
EXPECTED = [12, 39, 2]  # 36 blocks of 9 units
# of the puzzle: what an operation keeps (units) and how long its forward takes (ticks)
OPERATIONS = {
    "norm 1": (2, 1),
    "qkv": (1, 12),
    "scores": (12, 5),
    "values": (4, 3),
    "projection": (1, 4),
    "norm 2": (2, 1),
    "up": (1, 16),
    "gelu": (4, 2),
    "down": (4, 16),
}
ROOM = 12


def hint(exercise: int | None = None) -> None:
    """Print the next hint for an exercise, or for the first unsolved one."""
    hint_of(checks.topic("gradient_checkpointing"), exercise)


@exercise(
    "gradient_checkpointing-1",
    "Where to cut 36 blocks",
    "predict",
    minutes=5,
    points=1,
    hints=(
        "After the forward only the inputs of the segments are there: one unit each.",
        "In the backward one segment at a time is there in full: 9 units for each of its blocks.",
        "The best length is the square root of L / kappa, if that is a whole number.",
    ),
)
def numbers(answer: object) -> str:
    """Predict what 36 blocks of 9 units keep and peak at in segments of 3, and the best length."""
    kept, peak, best = needs_ints(answer, NUMBERS)
    if kept != EXPECTED[0]:
        unit = "one unit for each segment's input" if kept != 36 else "36 is one input per block, not per segment"
        raise Wrong(f"kept {kept}: {unit}")
    if peak != EXPECTED[1]:
        raise Wrong(f"peak {peak}: " + {27: "the inputs of the segments are there too"}.get(peak, "kept + 9 * length"))
    if best != EXPECTED[2]:
        its_peak = f"peaks at {-(-36 // best) + 9 * best}" if best > 0 else "is none"
        raise Wrong(f"length {best} {its_peak}; there is one that peaks at 36")
    return "12 kept, a peak of 39; segments of 2 peak at 36, as sqrt(36 / 9) says"


@exercise(
    "gradient_checkpointing-2",
    "A recomputation of your own",
    "implement",
    minutes=35,
    points=4,
    hints=(
        "Make an autograd function whose forward runs the segment (no graph is recorded there) and saves its inputs, "
        "and whose backward runs it again under torch.enable_grad() on detached inputs.",
        "Detach every tensor among the inputs; one that asked for a gradient before must ask again. "
        "The backward returns one gradient per input, None where none was asked for.",
        "torch.get_rng_state() in the forward; set it before the second run, and set the present one again after it.",
    ),
)
def function(fn: Callable[..., Any]) -> str:
    """Write `recompute(segment, *inputs)`: bitwise equal to `segment(*inputs)`, keeping nothing but the inputs."""
    needs_function(fn)
    for case in recomputing.CASES:
        if (
            problem := on_ranks(recomputing.try_case, 1, recomputing.without_others(fn), case, case=case)[0]
        ) is not None:
            raise Wrong(f"{case}: {problem}")
    return f"{len(recomputing.CASES)} cases, bitwise equal, two runs per segment, only the inputs kept"


@exercise(
    "gradient_checkpointing-3",
    "What to forget",
    "puzzle",
    minutes=10,
    points=2,
    hints=(
        "Compare units per tick: which operation frees much for little time?",
        f"Everything together keeps {sum(units for units, _ in OPERATIONS.values())} units; "
        f"at least {sum(units for units, _ in OPERATIONS.values()) - ROOM} have to go.",
        "The greedy choice by units per tick is good here; check whether its last member is needed.",
    ),
)
def what_to_forget(answer: object) -> str:
    """Choose the operations of one block to recompute: at most 12 units kept, as few ticks as possible."""
    chosen = _names(answer)
    kept = sum(units for name, (units, _) in OPERATIONS.items() if name not in chosen)
    ticks, best = _ticks(chosen), _least()
    if kept > ROOM:
        raise Wrong(f"recomputing {', '.join(chosen) or 'nothing'} keeps {kept} units, there is room for {ROOM}")
    if ticks > best:
        everything = _ticks(OPERATIONS)
        score = partial_score(ticks, everything, best)
        raise Wrong(f"it fits, for {ticks} ticks more; {best} are enough", score=score)
    return f"{kept} units kept for {ticks} more ticks of {_ticks(OPERATIONS)}"


@exercise(
    "gradient_checkpointing-4",
    "The masks that come again",
    "find the bug",
    minutes=10,
    points=2,
    hints=(
        "One step is right. Run two in a row and compare the second with a run that keeps everything.",
        "Which random numbers does the forward after a backward draw?",
        "The second run needs the old random state. Whoever comes afterwards needs the one that was there before it.",
    ),
)
def masks(fn: Callable[..., Any]) -> str:
    """Repair the recomputation after which the random stream goes on from the wrong place."""
    needs_function(fn)
    for num_steps in (1, 2, 3):
        case = f"{num_steps} step{'s' * (num_steps > 1)}"
        if (
            problem := on_ranks(recomputing.try_stream, 1, recomputing.without_others(fn), num_steps, case=case)[0]
        ) is not None:
            raise Wrong(f"{case} of two blocks with dropout: {problem}")
    return "1 to 3 steps: gradients and random stream as if everything were kept"


def _names(answer: object) -> list[str]:
    if not isinstance(answer, (list, tuple, set)) or not all(type(name) is str for name in answer):
        raise Wrong(f"expected a list of names such as ['norm 1', 'gelu'], got {type(answer).__name__}")
    if unknown := sorted(set(answer) - set(OPERATIONS)):
        raise Wrong(f"there is no operation named {unknown[0]!r}; use {', '.join(OPERATIONS)}")
    return [name for name in OPERATIONS if name in answer]


def _ticks(names: Iterable[str]) -> int:
    return sum(OPERATIONS[name][1] for name in names)


def _least() -> int:
    needed = sum(units for units, _ in OPERATIONS.values()) - ROOM
    return min(
        _ticks(names)
        for size in range(len(OPERATIONS) + 1)
        for names in combinations(OPERATIONS, size)
        if sum(OPERATIONS[name][0] for name in names) >= needed
    )
