"""The validator: does a program run to its end and compute every gradient exactly once?

Chapter: book/pp/gpipe.  In: a `Program`, plain or lowered.  Out: the same, or `InvalidProgram` with its problems.

  complete    every stage runs every microbatch: exactly one F, and exactly one B or else one I and one W
  ordered     F before B or I, I before W
  placed      a stage works on a microbatch on one rank; the microbatches take no more routes through the ranks than the
              program states in `num_directions` (1: no stage is on two ranks; 2: DualPipe's two directions)
  delivered   in a lowered program: one send and one receive per message, sent after it was made, received before it is
              used, and received in the order of sending on every link
  feasible    no rank waits for itself around a circle; otherwise the smallest such circle is explained, with the
              one action to move
  bounded     no rank holds more activations than allowed, if a bound is given
Elsewhere: torch `_validate_schedule` accepts a second F or B of a microbatch, a microbatch out of range, and a lowered
program without receives.
"""

from collections.abc import Sequence

from dualpipe_lab.pp.program import MESSAGE_KINDS, B, F, Program, W, actions_of
from dualpipe_lab.pp.validation.deadlock import DryRun
from dualpipe_lab.pp.validation.deadlock_fix import explanation
from dualpipe_lab.pp.validation.errors import InvalidProgram, Problems
from dualpipe_lab.pp.validation.index import check_work, survey
from dualpipe_lab.pp.validation.messages import check_deliveries
from dualpipe_lab.pp.validation.routes import check_routes

__all__ = ["InvalidProgram", "validate"]


def validate(program: Program, in_flight: int | Sequence[int] | None = None, blocking: bool = False) -> Program:
    """Return the program if it is valid; raise InvalidProgram with all its problems otherwise.

    `in_flight`: the most activations (stage and microbatch pairs, held from F to the end of B or W) that any rank may
    hold, or one bound per rank.  `blocking`: for a lowered program, also require that it ends where a send and its
    receive block until both ranks are there (rendezvous), not only where messages are buffered.

    >>> validate(Program.parse("crossed", ["0F0 0F1 0B1 0B0", "1F0 1B0 1F1 1B1"])).num_microbatches
    2
    """
    if program.feasible_order is None:
        program.feasible_order = _check(program)
    problems = Problems()
    if blocking and (deadlock := explanation(program, DryRun(program, survey(program, problems), blocking=True))):
        problems.add(deadlock)
    if in_flight is not None:
        _check_in_flight(program, in_flight, problems)
    problems.raise_if_any(program)
    return program


def _check(program: Program) -> list[tuple[int, int]]:
    problems = Problems()
    found = survey(program, problems)
    check_work(program, found, problems)
    problems.raise_if_any(program)  # messages and waits mean something only where all work is there, in order
    check_routes(program, problems)
    if not found.count.keys().isdisjoint(MESSAGE_KINDS):
        check_deliveries(program, found, problems)
    problems.raise_if_any(program)
    run = DryRun(program, found)
    if deadlock := explanation(program, run):
        problems.add(deadlock)
    problems.raise_if_any(program)
    return run.order


def _check_in_flight(program: Program, in_flight: int | Sequence[int], problems: Problems) -> None:
    bounds = [in_flight] * program.num_ranks if isinstance(in_flight, int) else list(in_flight)
    if len(bounds) != program.num_ranks:
        raise ValueError(
            f"in_flight lists {len(bounds)} bounds, the program has {program.num_ranks} ranks; give one each"
        )
    for rank, bound in enumerate(bounds):
        held = 0
        for position, step in enumerate(program.ranks[rank]):
            kinds = [action.kind for action in actions_of(step)]
            held += kinds.count(F)
            if held > bound:
                problems.add(
                    f"rank {rank}, position {position}: {step} makes it hold {held} activations, the bound is {bound}; "
                    "run a backward first"
                )
                break
            held -= kinds.count(B) + kinds.count(W)
