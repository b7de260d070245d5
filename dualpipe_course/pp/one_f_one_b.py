"""Exercises of "1F1B": a row on paper, rooms for tokens, memory for slow links, two pipelines side by side.

Chapter: book/pp/one-f-one-b.  Rows are judged by the validator, by what each rank holds and by their last tick; the
step by gradients of one process, by microbatches held and by model time.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dualpipe_course.declared import Implement, Predict, Puzzle, Repair
from dualpipe_course.pp import programs, token_rooms
from dualpipe_course.pp.gradients import without_library
from dualpipe_course.pp.loops import only_whole_backwards
from dualpipe_course.pp.several_pipelines import check_step
from dualpipe_course.trial import call_each, ended, partial_score
from dualpipe_course.variants import WORDS, Known
from dualpipe_course.wrong import Wrong
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.simulator import simulate

NAMES = ("forwards before the first B", "microbatch", "tick", "finished", "sum of the peaks", "sum for 3 microbatches")
RANKS, MICROBATCHES = 4, 10
SLOWEST, BUDGET, ROOM = 57, 52, 13  # ticks of 1F1B, ticks and activations of the puzzle, a message takes a tick
# tokens by microbatch, tokens by rank
ROOMS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((2,), (2,)),
    ((2, 1), (3,)),
    ((3, 2, 4), (5, 5)),
    ((2, 2, 2, 2), (8, 8)),
    ((1, 1, 1, 1), (1, 4, 4)),
    ((1, 3, 2, 2, 1), (4, 3, 9)),
    ((1, 1, 1, 1, 1, 1), (9, 2, 9, 9)),
    ((4, 1, 1, 1, 4, 1, 1, 1), (6, 8, 5, 9)),
    ((5, 1, 2, 7, 3, 3, 1, 6, 2, 4), (12, 9, 10, 7, 30)),
    ((1,) * 14, (99,) * 11),
)
PIPELINES: tuple[tuple[list[list[int]], int], ...] = (
    ([[0, 1, 2]], 4),
    ([[0, 1], [2, 3]], 4),
    ([[0, 2], [1, 3]], 5),
    ([[0, 2], [1, 3]], 1),
)


def _slips(f: int, b: int, m: int) -> Known:
    done, rest = divmod(f + 4 * b, f + b)
    return (
        (
            (3, "that is the warm-up; the steady phase begins with one more forward"),
            (5, "that is rank 0; three ranks follow rank 1"),
            (1, "that is the last rank; three ranks follow rank 1"),
        ),
        (
            (7, "a rank holds warm-up and one more: the forward after B0 is that of microbatch 4"),
            (9, "that is rank 0's row, whose warm-up is one longer"),
            (5, "that is the last rank's row, without a warm-up"),
        ),
        (
            (5 * f + 5 * b, "that is when it ends"),
            (5 * f, "that is the end of its own five forwards; the gradient is not there yet"),
            (5 * f + 2 * b, "a gradient also passes four ranks upwards, with a B on each"),
            (4 * f + 4 * b, f"F and B take {f} and {b} ticks: five forwards down, then four backwards up"),
        ),
        (
            (
                done + 1,
                f"the {('second', 'third', 'fourth')[done - 1]} is in its {'B' if rest >= f else 'F'}: "
                f"rank 4 begins at tick {4 * f} and finishes a microbatch every {f + b} ticks",
            ),
            (1, "rank 4 goes on while the first gradient travels up"),
            ((5 * f + 4 * b) // (f + b), f"rank 4 begins at tick {4 * f}, after four forwards"),
        ),
        (
            (60, "that is GPipe's, 12 on each rank"),
            (25, "only rank 0 holds 5"),
            (14, "each rank holds its warm-up and one more"),
            (10, "each rank holds its warm-up and one more"),
        ),
        (
            (15, f"no rank can hold more than the {m} microbatches that there are"),
            ((6 - m) * m, f"the last {WORDS[m - 1] + ' ranks hold' if m > 2 else 'rank holds'} fewer than {m}"),
            (m * (m + 1) // 2, f"rank r holds min(m, p - r): the first {WORDS[6 - m]} ranks hold {m} each"),
        ),
    )


def _short(numbers: Sequence[int]) -> str:
    return f"{len(numbers)} times {numbers[0]}" if len(numbers) > 10 else str(list(numbers))


def _judge_rows(fn: Callable[..., Any]) -> str:
    results = call_each(without_library(fn), [(list(sizes), list(room)) for sizes, room in ROOMS])
    for (sizes, room), (fine, value) in zip(ROOMS, results, strict=True):
        case = f"tokens {_short(sizes)}, room {_short(room)}"
        if not fine:
            raise Wrong(ended(case, value))
        token_rooms.check_rows(value, sizes, room, case)
    return f"{len(ROOMS)} cases end in time and within every rank's room, among them later ranks with more room"


def _judge_slow_links(answer: object) -> str:
    found = programs.parse(answer, RANKS, MICROBATCHES)
    only_whole_backwards(found)
    timeline = simulate(found, Cost(latency=1))
    peaks = [timeline.peak_activations(rank) for rank in range(RANKS)]
    ticks, held = timeline.makespan, sum(peaks)
    if held > ROOM:
        raise Wrong(f"{ticks} ticks, and the peaks {peaks} add up to {held}; {ROOM} are allowed", picture=timeline)
    if ticks > BUDGET:
        raise Wrong(
            f"the peaks {peaks} add up to {held}, and the step takes {ticks} ticks; {BUDGET} are allowed",
            score=partial_score(ticks, SLOWEST, BUDGET - 1),
            picture=timeline,
        )
    return f"at most {BUDGET} ticks with {ROOM} activations; with 12 no order is as quick"


numbers = Predict(
    "one_f_one_b-1",
    "Five ranks on paper",
    NAMES,
    lambda f, b, m: (4, 8, 5 * f + 4 * b, (f + 4 * b) // (f + b), 15, sum(min(stage, m) for stage in range(1, 6))),
    "F takes {f} ticks, B takes {b},",
    "a batch of {m} microbatches",
    minutes=8,
    points=2,
    trail=True,
    hints=(
        "Write the beginning of rank 1's row. Its warm-up fills the three ranks below it.",
        "Rank 0's first B needs the gradient of microbatch 0, which goes down through five F and up through four B.",
        "Rank 4 begins when four forwards are over. From then on a microbatch takes it 5 ticks.",
    ),
    slips=_slips,
    f=(2, 3, 4),
    b=(3, 4, 5, 6, 7),
    m=(3, 2, 4),
    called={"f": "F", "b": "B", "m": "microbatches"},
)

rows = Implement(
    "one_f_one_b-2",
    "Room for tokens",
    "Write `rows(sizes, room)`: 1F1B whose ranks have room for numbers of tokens.",
    judge=_judge_rows,
    minutes=20,
    points=3,
    hints=(
        "Keep the oldest microbatch that the rank holds, and its tokens. Before each F run B until both limits hold.",
        "Let rank 1 have more room than rank 0. Which F does rank 1 wait for, and what does rank 0 wait for?",
        "A rank holds no microbatch that the rank above has given back. So no rank can use more room than any rank "
        "above it has.",
    ),
)

slow_links = Puzzle(
    "one_f_one_b-3",
    "Thirteen in all",
    "Find rows for 4 ranks and 10 microbatches, messages of a tick: 52 ticks, peaks that add up to 13.",
    judge=_judge_slow_links,
    minutes=25,
    points=3,
    hints=(
        "Simulate the rows with lab.Cost(latency=1) and look at rank 2: which of its waits would one more forward "
        "before its first B fill?",
        "The last rank has its F and its B at once, without a message in between. What would a second activation do "
        "there?",
        "One forward more at the start of a rank needs one more on each rank above it, too. Three ranks get one more.",
    ),
)

side_by_side = Repair(
    "one_f_one_b-4",
    "Two pipelines side by side",
    "Repair a step that holds too many microbatches where several pipelines run at once.",
    cases=PIPELINES,
    judge=check_step,
    right="one and two pipelines: gradients of one process, 1F1B's memory and 1F1B's time",
    minutes=10,
    points=2,
    trail=True,
    hints=(
        "Print the length of `live` after each forward, with pipelines [0, 2] and [1, 3].",
        "How many stages lie below this rank? Not all ranks belong to its pipeline.",
        "The warm-up counts places of the pipeline, as the messages do already.",
    ),
)
