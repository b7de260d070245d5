"""The validator: checks that a program runs to its end and computes every gradient exactly once.

Chapter: book/pp/gpipe.  In: a `Program`, plain or lowered.  Out: the same, or `InvalidProgram` with its problems.
  complete    every stage runs every microbatch: exactly one F, and exactly one B or else one I and one W
  ordered     F before B or I, I before W
  placed      a stage works on a microbatch on one rank, and `num_directions` bounds the routes through the ranks
  delivered   in a lowered program: one send and one receive per message, in place and in the order of every link
  feasible    the waits of the ranks form no cycle; otherwise the smallest cycle is explained, with the action to move
  in order, bounded   if asked for: see `validate`
Elsewhere: torch `_validate_schedule` accepts a second F or B of a microbatch, a microbatch out of range, and a lowered
program without receives.
"""

from collections.abc import Sequence

from dualpipe_lab.pp.program import MESSAGE_KINDS, B, F, Program, W, actions_of
from dualpipe_lab.pp.validation.deadlock import UntimedRun, explain_deadlock
from dualpipe_lab.pp.validation.rules import (
    InvalidProgram,
    ProblemList,
    check_in_order,
    check_messages,
    check_routes,
    check_work,
    index_actions,
)

__all__ = ["InvalidProgram", "validate"]


def validate(
    program: Program,
    in_flight: int | Sequence[int] | None = None,
    blocking: bool = False,
    in_order: bool = False,
) -> Program:
    """Return the program if it is valid; raise InvalidProgram with all its problems otherwise.

    `in_flight`: the most activations (stage and microbatch pairs, held from F to the end of B or W) that any rank may
    hold, or one bound per rank.  `blocking`: for a lowered program, also require that it ends if a send and its receive
    block until both ranks have reached them (rendezvous), not only if messages are buffered.  `in_order`: for a lowered
    program, also require that it ends on NCCL: no tags, and the messages between two ranks, sends and receives of both
    directions together, complete in the order in which each rank launches them.

    >>> validate(Program.parse("crossed", ["0F0 0F1 0B1 0B0", "1F0 1B0 1F1 1B1"])).num_microbatches
    2
    """
    if program.feasible_order is None:
        program.feasible_order = _check(program)
    problems = ProblemList()
    if blocking and (
        deadlock := explain_deadlock(program, UntimedRun(program, index_actions(program, problems), blocking=True))
    ):
        problems.add(deadlock)
    if in_order and program.is_lowered:
        check_in_order(program, index_actions(program, problems), problems)
    if in_flight is not None:
        _check_in_flight(program, in_flight, problems)
    problems.raise_if_any(program)
    return program


def _check(program: Program) -> list[tuple[int, int]]:
    problems = ProblemList()
    index = index_actions(program, problems)
    check_work(program, index, problems)
    problems.raise_if_any(program)  # messages and waits can be checked only if the work is complete and in order
    check_routes(program, problems)
    if not index.count.keys().isdisjoint(MESSAGE_KINDS):
        check_messages(program, index, problems)
    problems.raise_if_any(program)
    run = UntimedRun(program, index)
    if deadlock := explain_deadlock(program, run):
        problems.add(deadlock)
    problems.raise_if_any(program)
    return run.order


def _check_in_flight(program: Program, in_flight: int | Sequence[int], problems: ProblemList) -> None:
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
