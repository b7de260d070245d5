"""What one rank holds over time, counted in (stage, microbatch) pairs.

activations               from the start of F to the end of B, or of W where the backward is split: W still needs them
pending weight gradients  from the end of I to the end of W; a whole backward B leaves none
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from dualpipe_lab.timeline.spans import Span, Time


class Holding(NamedTuple):
    """What makes a count rise, at its start or its end, and what makes it fall at its end."""

    opens: str
    at_start: bool
    closes: str


ACTIVATIONS = Holding("F", True, "BW")
PENDING_WEIGHT_GRADS = Holding("I", False, "W")


def step_function(spans: Sequence[Span], what: Holding) -> list[tuple[Time, int]]:
    """Return [(time, count)]: the count holds from its time until the next entry's."""
    changes = _changes(spans, what)
    steps: dict[Time, int] = {0: 0}
    for (time, _), count in zip(changes, accumulate(delta for _, delta in changes), strict=True):
        steps[time] = count  # the last change at a time decides
    counts = list(steps.items())
    return [entry for i, entry in enumerate(counts) if i == 0 or entry[1] != counts[i - 1][1]]


def peak(spans: Sequence[Span], what: Holding) -> int:
    """Return the largest count, including those that last no time at all."""
    return max(accumulate((delta for _, delta in _changes(spans, what)), initial=0))


def _changes(spans: Sequence[Span], what: Holding) -> list[tuple[Time, int]]:
    changes: list[tuple[Time, int]] = []
    for span in spans:
        kinds = [kind for _, kind, _ in span.parts]
        changes += [(span.start if what.at_start else span.end, 1) for kind in kinds if kind == what.opens]
        changes += [(span.end, -1) for kind in kinds if kind in what.closes]
    # Stable: where one span ends and the next begins, the activation is freed before the next one is made.
    return sorted(changes, key=itemgetter(0))
