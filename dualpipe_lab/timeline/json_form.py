"""Timelines as plain JSON values and back, without loss: an integer is a number, a fraction is the text "3/2".

span      [start, end, kind, stage, microbatch, label]      and the pair [[stage, kind, microbatch], ...] if it is one;
          pair (or null) and stream follow if the stream is not "work"
message   [src, dst, sent, arrived, label, num_bytes, left]
costs     the costs of a simulation, see `Cost.to_dict`; absent if there are none
"""

from fractions import Fraction
from typing import Any

from dualpipe_lab.timeline.spans import WORK, ActionKey, Message, Span, Time

FORMAT = "dualpipe-lab/timeline/1"
PER_PAIR = "per pair"  # in costs: every overlapped pair takes as long as its span says


def pack_span(span: Span) -> list[Any]:
    """Return a span as plain JSON values, without its rank."""
    row = [pack(span.start), pack(span.end), span.kind, span.stage, span.microbatch, span.label]
    pair = None if span.pair is None else [list(action) for action in span.pair]
    if span.stream != WORK:
        return [*row, pair, span.stream]
    return row if pair is None else [*row, pair]


def unpack_span(rank: int, row: list[Any]) -> Span:
    """Return the span that `pack_span` wrote."""
    start, end, kind, stage, microbatch, label = row[:6]
    pair, stream = row[6] if len(row) > 6 else None, row[7] if len(row) > 7 else WORK
    pairs: tuple[ActionKey, ActionKey] | None = None
    if pair:
        first, second = pair
        pairs = (first[0], first[1], first[2]), (second[0], second[1], second[2])
    return Span(rank, unpack(start), unpack(end), kind, stage, microbatch, label, pairs, stream)


def pack_message(message: Message) -> list[Any]:
    """Return a message as plain JSON values."""
    left = None if message.left is None else pack(message.left)
    sent, arrived = pack(message.sent), pack(message.arrived)
    return [message.src, message.dst, sent, arrived, message.label, message.num_bytes, left]


def unpack_message(row: list[Any]) -> Message:
    """Return the message that `pack_message` wrote."""
    src, dst, sent, arrived, label, num_bytes, left = row
    return Message(src, dst, unpack(sent), unpack(arrived), label, num_bytes, None if left is None else unpack(left))


def pack(time: Time) -> int | str:
    """Return a time as a JSON value."""
    return f"{time.numerator}/{time.denominator}" if time.denominator != 1 else int(time)


def unpack(value: int | str) -> Time:
    """Return the time that `pack` wrote."""
    return Fraction(value) if isinstance(value, str) else value
