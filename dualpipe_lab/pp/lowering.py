"""Lowering: inserts the sends and receives that a program needs.

Chapter: book/pp/gpipe.  In: a plain `Program`.  Out: the same program with SEND_F, RECV_F, SEND_B and RECV_B.
`1SEND_F0` sends the activation of microbatch 0 from stage 1 to the rank of stage 2, where `2RECV_F0` receives it.
Neighbouring stages on one rank (the tip of a V) need no message.
Elsewhere: torch `_add_send_recv`; d9d's communication pass.
"""

from typing import TypeAlias

from dualpipe_lab.pp.cost import UNIT_COST
from dualpipe_lab.pp.program import SEND_F, Program, ProgramStep
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.validation.rules import ProblemList, index_actions, required_messages, strip
from dualpipe_lab.pp.validation.validator import validate
from dualpipe_lab.timeline import Time

__all__ = ["lower", "strip"]

# Time; messages (0) before steps (1) of that time; forward (0) before backward (1); the stage, downstream first, so
# that a rank sends its result before it receives its next input; the microbatch tells DualPipe's directions apart.
OrderKey: TypeAlias = tuple[Time, int, int, int, int]


def lower(program: Program) -> Program:
    """Return the program with its sends and receives; those of a lowered program are replaced by new ones.

    Raises InvalidProgram for a program that is incomplete or would deadlock.

    >>> from dualpipe_lab.pp.schedules import gpipe
    >>> print(lower(gpipe(2, 1)))
    # GPipe: 2 ranks, 2 stages, 1 microbatches
    rank 0: 0F0 0SEND_F0 0RECV_B0 0B0
    rank 1: 1RECV_F0 1F0 1B0 1SEND_B0
    """
    plain = strip(program) if validate(program).is_lowered else program
    return plain.with_ranks(_merge(plain))


def _merge(program: Program) -> list[list[ProgramStep]]:
    """List steps and messages by time; a message has that of the end of the step that makes it, in unit times.

    All ranks follow one common order.  So the program ends even if sends and receives block until both ranks have
    reached them (rendezvous), and both ends of a link have one order.
    """
    timeline = simulate(program, UNIT_COST)
    index = index_actions(program, ProblemList())
    lists: list[list[tuple[OrderKey, ProgramStep]]] = [
        [((span.start, 1, 0, 0, 0), step) for span, step in zip(spans, steps, strict=True)]
        for spans, steps in zip(timeline.spans_by_rank, program.ranks, strict=True)
    ]
    for send, recv, made_by, used_by in required_messages(program, index):
        rank, position = index.locate(made_by)
        end = timeline.spans_by_rank[rank][position].end
        is_forward = send.kind == SEND_F
        key = (end, 0, not is_forward, -send.stage if is_forward else send.stage, send.microbatch)
        lists[rank].append((key, send))
        lists[index.locate(used_by)[0]].append((key, recv))
    return [[step for _, step in sorted(entries)] for entries in lists]
