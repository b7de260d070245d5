"""Exercises of "GPipe": its numbers, its program, its step with recomputation, its memory, its weights.

Chapter: book/pp/gpipe.  Programs are judged by the validator and the simulator, gradients against one process in
float64, live activations by what autograd really keeps.
"""

from collections.abc import Callable
from typing import Any

from dualpipe_course import check as checks
from dualpipe_course.exercise import Wrong, exercise, hint_of
from dualpipe_course.pp import gpipe_step, gradients
from dualpipe_course.pp.loops import only_whole_backwards
from dualpipe_course.pp.programs import check_rows, parse
from dualpipe_course.trial import call_each, ended, needs_function, needs_ints, partial_score, smallest_failing
from dualpipe_lab.pp.simulator import simulate

NUMBERS = ("makespan", "bubble per rank", "peak of live activations")
EXPECTED = (60, 24, 6)
# of the puzzle, with F = 1 and B = 2; GPipe with a flush after every three microbatches is the slowest
RANKS, MICROBATCHES, MAKESPAN, MEMORY, SLOWEST = 4, 8, 39, 3, 51
_MISTAKES = {
    54: "this is the makespan with free messages; each of 3 boundaries delays the first F and the last B by one tick",
    57: "gradients travel too: 3 ticks on the way down and 3 on the way up",
    66: "only the first activation and the last gradient make anyone wait longer, once per boundary",
    36: "this is one rank's work; the first and the last microbatch also pass the other stages",
}


def hint(exercise: int | None = None) -> None:
    """Print the next hint for an exercise, or for the first unsolved one."""
    hint_of(checks.topic("gpipe"), exercise)


@exercise(
    "gpipe-1",
    "Three numbers",
    "predict",
    minutes=5,
    points=1,
    hints=(
        "With free messages the makespan is (m + p - 1)(t_F + t_B). What does a latency of 1 tick add, and how often?",
        "The bubble of a rank is the makespan minus its work, m (t_F + t_B).",
        "No B runs before the last F. How many activations does a rank hold then?",
    ),
)
def numbers(answer: object) -> str:
    """Predict makespan, bubble per rank and peak for p=4, m=6, t_F=2, t_B=4 and a latency of 1 tick."""
    makespan, bubble, peak = needs_ints(answer, NUMBERS)
    if makespan != EXPECTED[0]:
        raise Wrong(f"makespan {makespan}: " + _MISTAKES.get(makespan, "draw ranks 0 and 1 first, then count"))
    if bubble != EXPECTED[1]:
        raise Wrong(f"bubble {bubble}: a rank works for m (t_F + t_B) = 36 of the 60 ticks")
    if peak != EXPECTED[2]:
        raise Wrong(f"peak {peak}: count the forwards that a rank has done before its first backward")
    return "makespan 60, bubble 24 on every rank, 6 live activations"


@exercise(
    "gpipe-2",
    "The program, with its messages",
    "implement",
    minutes=15,
    points=3,
    hints=(
        "Write one rank first: for each microbatch RECV_F, F, SEND_F; then for each RECV_B, B, SEND_B.",
        "Which of the four messages does stage 0 not have? And the last stage?",
        "A send carries the stage that made the result: 0SEND_F3 leaves stage 0 and meets 1RECV_F3.",
    ),
)
def program(fn: Callable[..., Any]) -> str:
    """Write GPipe's rows with sends and receives for any number of ranks and microbatches."""
    sizes = sorted(((p, m) for p in range(1, 6) for m in range(1, 7)), key=lambda size: (sum(size), size))
    results = call_each(gradients.without_library(fn), [*sizes, (8, 20)])
    for (p, m), (fine, value) in zip([*sizes, (8, 20)], results, strict=True):
        case = f"{p} rank(s), {m} microbatch(es)"
        if not fine:
            raise Wrong(ended(case, value))
        check_rows(value, p, m, case)
    return "valid, free of deadlock and as short as GPipe on 31 sizes, messages included"


@exercise(
    "gpipe-3",
    "Keep the input, compute again",
    "implement",
    minutes=35,
    points=4,
    hints=(
        "In the forwards, run the stage under torch.no_grad() and keep only its input.",
        "In the backwards, run the stage again on the kept input, this time with gradients, and start the chain rule "
        "with what the next stage sent.",
        "On the last stage the loss is computed in the backward, divided by the number of microbatches. The input of "
        "every stage but the first needs requires_grad_() before the second run.",
    ),
)
def recompute_step(fn: Callable[..., Any]) -> str:
    """Run one GPipe step that keeps one input per microbatch and recomputes the rest."""
    needs_function(fn)
    for world_size, num_microbatches in ((1, 1), (1, 3), (2, 1), (2, 8), (3, 2)):
        gpipe_step.check_step(fn, world_size, num_microbatches)
    return "gradients equal one process, one microbatch's activations live, 2 (p - 1) m messages"


@exercise(
    "gpipe-4",
    "Room for three",
    "puzzle",
    minutes=20,
    points=2,
    hints=(
        "From its F on rank 0 to the end of its B there, a microbatch takes 4 + 8 ticks if it never waits. With room "
        "for 3, how many such journeys follow one another?",
        "Which is more urgent on rank 1, a backward that makes room on rank 0 or a forward that fills the ranks below?",
        "Let every rank run a backward as soon as its gradient is there, and a forward only where none is. Rank 1 "
        "begins 1F0 1F1 1F2 1B0 1B1 1F3.",
    ),
)
def less_memory(answer: object) -> str:
    """Find a program of F and B for 4 ranks and 8 microbatches: 39 ticks, at most 3 live activations per rank."""
    found = parse(answer, RANKS, MICROBATCHES)
    only_whole_backwards(found)
    timeline = simulate(found)
    peaks = [timeline.peak_activations(rank) for rank in range(RANKS)]
    if max(peaks) > MEMORY:
        worst = peaks.index(max(peaks))
        raise Wrong(
            f"{timeline.makespan} ticks, but rank {worst} holds {peaks[worst]} activations, the limit is {MEMORY}; "
            f"all {peaks}",
            picture=timeline,
        )
    if timeline.makespan > MAKESPAN:
        raise Wrong(
            f"it fits, with {timeline.makespan} ticks; {MAKESPAN} are possible. Rank 0 is idle for "
            f"{timeline.bubble_time(0)}",
            score=partial_score(timeline.makespan, SLOWEST, MAKESPAN),
            picture=timeline,
        )
    return f"{timeline.makespan} ticks with {sum(peaks)} activations in all; with room for 3 no order is quicker"


@exercise(
    "gpipe-5",
    "The mean of means",
    "find the bug",
    minutes=10,
    points=2,
    hints=(
        "Compare the gradients for microbatches of 2 and 2 rows, then of 3 and 1.",
        "loss_fn is the mean over the rows of one microbatch. Which share of the batch's rows is that?",
        "A microbatch weighs by its rows over all rows. 1/M is that only where all have equally many.",
    ),
)
def unequal_microbatches(fn: Callable[..., Any]) -> str:
    """Repair `accumulate(model, loss_fn, inputs, targets)` for microbatches of unequal size."""
    needs_function(fn)
    cases = [(2,), (2, 2), (2, 1), (1, 2, 3), (1, 1, 4, 2, 2), (3, 0, 2)]
    reports = gradients.accumulate_reports(fn, cases)
    failing = next((case for case, report in zip(cases, reports, strict=True) if report), None)
    if failing is None:
        return "gradients and loss equal those of the whole batch, for equal and unequal microbatches"
    smallest = smallest_failing(failing, lambda case: bool(gradients.accumulate_reports(fn, [case])[0]), _smaller)
    raise Wrong(gradients.accumulate_reports(fn, [smallest])[0])


def _smaller(rows: tuple[int, ...]) -> Any:
    for place, number in enumerate(rows):
        if sum(rows) > number:  # a batch without rows has no mean
            yield rows[:place] + rows[place + 1 :]
        if number > 1:
            yield (*rows[:place], number - 1, *rows[place + 1 :])
