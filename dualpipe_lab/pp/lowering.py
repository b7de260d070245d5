"""Lowering: insert the sends and receives that a program needs.

Chapter: book/pp/gpipe.  In: a plain `Program`.  Out: the same program with SEND_F, RECV_F, SEND_B and RECV_B.

  messages     2 * (num_stages - 1) * num_microbatches if no two neighbouring stages share a rank
  `1SEND_F0`   hand the activation that stage 1 made of microbatch 0 to the rank of stage 2
  `2RECV_F0`   expect it there; the rank waits for it only before `2F0`

Every message gets one moment, the end of the step that makes it when all work takes unit time, and every rank lists
its steps and messages in the order of their moments.  As all ranks follow one common order, the program ends even where
sends and receives block until both ranks are there (rendezvous), and both ends of a link agree on the order.
Stages that meet on one rank (the tip of a V) hand over without a message.
Elsewhere: torch `_add_send_recv`; d9d's communication pass.
"""

from typing import TypeAlias

from dualpipe_lab.pp.cost import UNIT_COST
from dualpipe_lab.pp.program import SEND_F, Program, Step
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.validation.errors import Problems
from dualpipe_lab.pp.validation.index import survey
from dualpipe_lab.pp.validation.messages import deliveries, strip
from dualpipe_lab.pp.validation.validator import validate
from dualpipe_lab.timeline import Time

__all__ = ["lower", "strip"]

# When; messages (0) before steps (1) of that time; forward (0) before backward (1); the stage, downstream first, so
# that a rank passes its result on before it looks for its next input; the microbatch tells DualPipe's directions apart.
Moment: TypeAlias = tuple[Time, int, int, int, int]


def lower(program: Program) -> Program:
    """Return the program with its sends and receives; a lowered one gets fresh ones in the same places.

    Raises InvalidProgram for a program that is incomplete or would deadlock.

    >>> from dualpipe_lab.pp.schedules import gpipe
    >>> print(lower(gpipe(2, 1)))
    # GPipe: 2 ranks, 2 stages, 1 microbatches
    rank 0: 0F0 0SEND_F0 0RECV_B0 0B0
    rank 1: 1RECV_F0 1F0 1B0 1SEND_B0
    """
    plain = strip(program) if validate(program).is_lowered else program
    return plain.with_ranks(_merge(plain))


def _merge(program: Program) -> list[list[Step]]:
    timeline = simulate(program, UNIT_COST)
    found = survey(program, Problems())
    lists: list[list[tuple[Moment, Step]]] = [
        [((span.start, 1, 0, 0, 0), step) for span, step in zip(spans, steps, strict=True)]
        for spans, steps in zip(timeline.spans_by_rank, program.ranks, strict=True)
    ]
    for send, recv, made_by, used_by in deliveries(program, found):
        rank, position = found.place(made_by)
        end = timeline.spans_by_rank[rank][position].end
        is_forward = send.kind == SEND_F
        moment = (end, 0, not is_forward, -send.stage if is_forward else send.stage, send.microbatch)
        lists[rank].append((moment, send))
        lists[found.place(used_by)[0]].append((moment, recv))
    return [[step for _, step in sorted(entries)] for entries in lists]
