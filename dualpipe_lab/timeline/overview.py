"""The overview of a long timeline: the share of each kind of work in equal stretches of time.

In: the spans of a rank.  Out: shares by kind, and one character per stretch.
"""

from collections.abc import Iterable
from fractions import Fraction
from typing import TypeAlias

from dualpipe_lab.timeline.spans import WAIT, Span, Time

Shares: TypeAlias = dict[str, float]  # kind -> share of the stretch, 0 to 1

_PURE = 0.9  # of the work: a letter stands for (almost) one kind


def buckets(spans: Iterable[Span], makespan: Time, count: int | Fraction) -> list[Shares]:
    """Divide 0..makespan into `count` equal stretches; return the share of every kind of work in each.

    A pair counts half as forward and half as backward.  Waiting counts as idle.
    """
    num_buckets = int(count)
    shares: list[Shares] = [{} for _ in range(num_buckets)]
    per_time = float(num_buckets / Fraction(makespan))  # a picture: floating point is exact enough
    for span in spans:
        kinds = [kind for _, kind, _ in span.actions] or [span.kind]
        start, end = float(span.start) * per_time, float(span.end) * per_time
        for index in range(int(start), min(int(end) + 1, num_buckets)) if span.kind != WAIT else ():
            covered = min(end, index + 1) - max(start, index)
            for kind in kinds if covered > 0 else ():
                shares[index][kind] = shares[index].get(kind, 0.0) + covered / len(kinds)
    return shares


def symbol(shares: Shares) -> str:
    """Return one character for a stretch: a kind's letter, # for mixed work, + for partly and . for mostly idle."""
    busy = sum(shares.values())
    if busy < 1 / 8:
        return "."
    if busy < 7 / 8:
        return "+"
    kind = max(shares, key=lambda kind: shares[kind])
    return kind[0] if shares[kind] >= _PURE * busy else "#"
