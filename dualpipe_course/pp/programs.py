"""Judging programs that learners write: rows of text against the validator, the simulator and the closed form."""

from collections.abc import Callable, Sequence
from itertools import zip_longest

from dualpipe_course.wrong import Wrong
from dualpipe_lab.pp.cost import UNIT_COST, Cost
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.validation.validator import InvalidProgram, validate


def parse(answer: object, num_ranks: int, num_microbatches: int, num_stages: int | None = None) -> Program:
    """Make a valid program of the given size (by default a stage per rank) from rows of text, or raise `Wrong`."""
    rows = answer.split("\n") if isinstance(answer, str) else answer
    if not isinstance(rows, (list, tuple)) or not all(isinstance(row, str) for row in rows):
        raise Wrong(f"expected one line of text per rank, such as '0F0 0F1 0B0 0B1', got {type(answer).__name__}")
    rows = [row for row in rows if row.strip()]
    if len(rows) != num_ranks:
        raise Wrong(f"{len(rows)} rows for {num_ranks} ranks; write one per rank")
    try:
        steps = Program.parse("yours", rows).ranks
        stages = num_ranks if num_stages is None else num_stages
        return validate(Program("yours", steps, num_stages=stages, num_microbatches=num_microbatches))
    except InvalidProgram as error:
        raise Wrong("the validator says: " + "; ".join(error.problems[:3])) from None
    except ValueError as error:
        raise Wrong(str(error)) from None


def check_actions(rows: Sequence[str], expected: Program, case: str) -> None:
    """Raise `Wrong` at the first action that differs, and say what the rows as they are would do."""
    if off := other_action(rows, expected):
        raise Wrong(f"{case}: {off}")


def other_action(
    rows: Sequence[str], expected: Program, cost: Cost = UNIT_COST, why: Callable[[int, int], str] = lambda *_: ""
) -> str:
    """Name the first action that differs, and say what the rows as they are would do under `cost`; or nothing.

    `why(rank, place)` adds to an action's place, such as ", in step 3".
    """
    for rank, (found, known) in enumerate(zip(rows, expected.rows(), strict=True)):
        pairs = zip_longest(found.split(), known.split(), fillvalue="nothing")
        for place, (ours, theirs) in enumerate(pairs):
            if ours != theirs:
                where = f"rank {rank}, action {place + 1}{why(rank, place)}: {ours}, expected {theirs}"
                return f"{where}; {_consequence(rows, expected, cost)}"
    return ""


def look_at_rows(value: object, expected: Program, cost: Cost, why: Callable[[int, int], str] = lambda *_: "") -> str:
    """Say what is wrong with a part's rows: their number, or the first action that differs; or nothing."""
    if not isinstance(value, (list, tuple)) or any(type(row) is not str for row in value):
        return f"expected a list of rows, each a text such as '0F0 0B0', got {value!r:.60}"
    if len(value) != expected.num_ranks:
        return f"{len(value)} row(s) for {expected.num_ranks} position(s)"
    return other_action(value, expected, cost, why)


def look_at_place(place: object, expected: Program, name: str) -> str:
    """Say for which stage and microbatch a part's place is not where the program runs it; or nothing."""
    if not callable(place):
        return f"{name} returns a function of stage and microbatch, got {type(place).__name__}"
    for microbatch in range(expected.num_microbatches):
        for stage in range(expected.num_stages):
            found, known = place(stage, microbatch), expected.rank_of(stage, microbatch)
            if found != known:
                return f"place({stage}, {microbatch}) is {found!r:.40}, and position {known} runs stage {stage} for it"
    return ""


def _consequence(rows: Sequence[str], expected: Program, cost: Cost) -> str:
    """Say what rows would do in place of the expected program's."""
    try:
        ours = simulate(validate(expected.with_ranks(Program.parse("yours", rows).ranks)), cost)
    except InvalidProgram as error:
        return f"the validator says: {error.problems[0]}"
    except ValueError as error:
        return str(error)
    known = simulate(expected, cost)
    held, most = ([run.peak_activations(rank) for rank in range(expected.num_ranks)] for run in (ours, known))
    ticks = "" if cost is UNIT_COST else f"with F, I, W, F&B of {cost.F}, {cost.I}, {cost.W}, {cost.overlap} ticks "
    if (ours.makespan, held) == (known.makespan, most):
        return f"{ticks}it is as quick for this size and holds as much, but it is another order"
    return f"{ticks}yours takes {ours.makespan} ticks and holds {held}, expected {known.makespan} and {most}"
