"""Exercises of "PipeDream": its versions, several steps of 1F1B with and without a flush, two sends that meet.

Chapter: book/pp/pipedream.  Rows are judged action by action and by the simulator, messages by the validator where a
send waits for its receiver.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.pp import programs
from dualpipe_course.pp.gradients import without_library
from dualpipe_course.trial import call_each, ended
from dualpipe_course.wrong import Wrong
from dualpipe_lab.pp.closed_forms import num_messages
from dualpipe_lab.pp.program import MESSAGE_KINDS, Program
from dualpipe_lab.pp.repeat import repeat
from dualpipe_lab.pp.schedules.flush import one_f_one_b
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.validation.validator import InvalidProgram, validate

NAMES = ("used", "newest at B", "kept", "used with vertical sync", "kept with vertical sync", "peak")
_SLIPS: tuple[dict[int, str], ...] = (
    {
        6: "this is stage 0's, 3 updates old; stage 1 is one stage nearer to the loss",
        8: "this is stage 2's; two stages lie below stage 1",
        9: "this is without a delay, as on the last stage; updates 7 and 8 come after the F",
    },
    {
        7: "between F and B of a minibatch the stage makes more updates: one with each B in between",
        8: "minibatches 0 to 8 have all had their B by then, and numbers start with 0",
        10: "the update of minibatch 9 comes after its B",
    },
    {4: "this is what stage 0 keeps", 2: "the minibatches on the way at stage 1 are 7, 8 and 9, with a version each"},
    {7: "this is stashing without sync; now stage 0's version goes along"},
    {3: "stage 0's version is one update older than what stage 1 would use, so it is kept for one update more"},
    {3: "p - r needs as many microbatches; here a batch has only 2", 4: "rank 1, not rank 0, and a batch has only 2"},
)
SIZES = sorted(product((1, 2, 3, 4, 6), (1, 2, 3, 4, 7), (1, 2, 3), (True, False)), key=lambda c: (sum(c[:3]), c))
PLAIN = sorted([*product(range(1, 6), range(1, 8)), (11, 4), (12, 13)], key=lambda c: (sum(c), c))


def _check_rows(value: object, p: int, m: int, steps: int, flush: bool, case: str) -> None:
    if not isinstance(value, list) or any(type(row) is not str for row in value) or len(value) != p:
        raise Wrong(f"{case}: expected a list of {p} line(s) of text, one per rank, got {_short(value)}")
    expected = repeat(one_f_one_b(p, m), steps) if flush else one_f_one_b(p, m * steps)
    programs.check_actions(value, expected, case)


def _check_messages(value: object, plain: Program, case: str) -> None:
    try:
        program = programs.parse(value, plain.num_ranks, plain.num_microbatches)
    except Wrong as wrong:
        raise Wrong(f"{case}: {wrong.message}") from None
    work = [[str(action) for action in row if action.kind not in MESSAGE_KINDS] for row in _actions(program)]
    for rank, (ours, theirs) in enumerate(zip(work, plain.rows(), strict=True)):
        if " ".join(ours) != theirs:
            raise Wrong(f"{case}: rank {rank} now works in the order {' '.join(ours)}; leave it at {theirs}")
    count = sum(action.kind in MESSAGE_KINDS for row in _actions(program) for action in row)
    if count != 2 * (expected := num_messages(plain.num_ranks, plain.num_microbatches)):
        raise Wrong(f"{case}: {count} sends and receives, expected {2 * expected}, a send and a receive per message")
    try:
        validate(program, blocking=True)
    except InvalidProgram as error:
        stands, _, _ = error.problems[0].partition("\n      fix")  # where they stand; the way out is the exercise
        raise Wrong(f"{case}, where a send waits for its receiver: {stands}") from None
    if (ticks := programs.literal_makespan(program)) > (best := simulate(plain).makespan):
        raise Wrong(
            f"{case}: it ends, after {ticks} ticks instead of {best}: a message leaves, or is awaited, later or "
            f"earlier than it need be\n  " + "\n  ".join(program.rows())
        )


def _actions(program: Program) -> list[list[Any]]:
    return [list(program.actions(rank)) for rank in range(program.num_ranks)]


def _short(value: object) -> str:
    return f"{len(value)} things" if isinstance(value, list) else type(value).__name__


def _judge_rows(fn: Callable[..., Any]) -> str:
    results = call_each(without_library(fn), SIZES)
    for (p, m, steps, flush), (fine, value) in zip(SIZES, results, strict=True):
        case = f"{p} rank(s), {m} microbatch(es), {steps} step(s), {'with' if flush else 'without'} flush"
        if not fine:
            raise Wrong(ended(case, value))
        _check_rows(value, p, m, steps, flush, case)
    return f"{len(SIZES)} sizes, action by action, fewer microbatches than ranks among them"


def _judge_messages(fn: Callable[..., Any]) -> str:
    plain = [one_f_one_b(p, m) for p, m in PLAIN]
    results = call_each(without_library(fn), [(list(program.rows()),) for program in plain])
    for program, (fine, value) in zip(plain, results, strict=True):
        case = f"{program.num_ranks} rank(s), {program.num_microbatches} microbatch(es)"
        if not fine:
            raise Wrong(ended(case, value))
        _check_messages(value, program, case)
    return f"{len(plain)} sizes end where a send waits for its receiver, as quickly as with free messages"


versions = Predict(
    "pipedream-1",
    "One minibatch meets stage 1",
    NAMES,
    lambda p, k: (k - p + 2, k, p - 1, k - p + 1, p, 2),
    "PipeDream on {p} ranks",
    "the F of minibatch {k}?",
    "the B of minibatch {k} starts",
    "use for minibatch {k}?",
    "on the same {p} ranks",
    minutes=10,
    points=2,
    hints=(
        "Write the row of rank 1 from 1F8 to 1B9. Each B is followed by an update.",
        "Rank 1 runs two forwards first, then F and B in turn: 1F9 1B7 1F10 1B8 1F11 1B9. How many B come before 1F9?",
        "Vertical sync: what was stage 0's version when it ran 0F9? It is three updates behind.",
    ),
    slips=_SLIPS,
    p=(4, 5, 6),
    k=(9, 8, 10, 11, 12, 13, 14, 15),
    called={"p": "ranks", "k": "minibatch"},
)

rows = Implement(
    "pipedream-2",
    "With and without the flush",
    "Write `rows(num_ranks, num_microbatches, num_steps, flush)`: steps of 1F1B, drained in between or not.",
    judge=_judge_rows,
    minutes=15,
    points=3,
    hints=(
        "Start with one step: p - 1 - rank forwards, then one F and one B in turn, then the backwards that are left.",
        "With fewer microbatches than p - 1 - rank there are no pairs: all F, then all B.",
        "Without a flush the run is one step of num_steps * num_microbatches; with it, each step is one of its own.",
    ),
)

messages = Repair(
    "pipedream-3",
    "Both neighbours send first",
    "Repair `with_messages(rows)`, whose sends meet: 1F1B must end where a send waits for its receiver.",
    judge=_judge_messages,
    minutes=35,
    points=2,
    hints=(
        "Give lab.validate a lowered program and blocking=True: it names the ranks that wait for each other.",
        "Rank 0 sends an activation down while rank 1 sends a gradient up. It is enough that one of them receives "
        "first; which of the two has nothing to lose?",
        "A rank that has run B can receive the activation of its next F before it sends the gradient. Keep the send "
        "for as long, but not until F is done.",
    ),
)
