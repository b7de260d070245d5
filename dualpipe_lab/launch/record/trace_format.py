"""The file of a rank's trace: one JSON value per line, so that a rank that dies leaves all of its whole lines.

Chapter: book/appendix/gpus.  In: what a rank recorded.  Out: lines, and the same again.
  head    {"format", "rank", "world_size", "host", "pid", "every", "length"}
  clock   {"clock": [time, gained, bound]}     what rank 0's clock has gained on this one since the start, +- bound
  step    {"step", "partial", "forgotten", "spans", "collectives", "sent", "received"}
  end     {"end": true}                        the rank closed the file; without it the run was ended
Times are nanoseconds of the rank's own clock since all ranks started.
"""

from collections import Counter
from typing import Any

from dualpipe_lab.launch.record.trace import RankTrace, Received, Sent
from dualpipe_lab.timeline.json_form import pack_span, unpack_span

FORMAT = "dualpipe-lab/trace/1"


def pack_step(step: int, trace: RankTrace) -> dict[str, Any]:
    """Return what a rank recorded in one step as plain JSON values."""
    return {
        "step": step,
        "partial": trace.is_partial,
        "forgotten": [[*channel, number] for channel, number in trace.forgotten.items()],
        "spans": [pack_span(span) for span in trace.spans],
        "collectives": [pack_span(span) for span in trace.collectives],
        "sent": trace.sent,
        "received": trace.received,
    }


def unpack_step(rank: int, values: dict[str, Any]) -> RankTrace:
    """Return the trace that `pack_step` wrote."""
    return RankTrace(
        rank,
        [unpack_span(rank, row) for row in values["spans"]],
        [unpack_span(rank, row) for row in values["collectives"]],
        [Sent(*row) for row in values["sent"]],
        [Received(*row) for row in values["received"]],
        Counter({(peer, stream): number for peer, stream, number in values["forgotten"]}),
        is_partial=values["partial"],
    )
