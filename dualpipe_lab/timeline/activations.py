"""Live activations of one rank: how many (stage, microbatch) pairs it holds, over time."""

from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter

from dualpipe_lab.timeline.spans import Span, Time


def step_function(spans: Sequence[Span]) -> list[tuple[Time, int]]:
    """Return [(time, count)]: the count holds from its time until the next entry's."""
    changes = _changes(spans)
    steps: dict[Time, int] = {0: 0}
    for (time, _), count in zip(changes, accumulate(delta for _, delta in changes), strict=True):
        steps[time] = count  # the last change at a time decides
    counts = list(steps.items())
    return [entry for i, entry in enumerate(counts) if i == 0 or entry[1] != counts[i - 1][1]]


def peak(spans: Sequence[Span]) -> int:
    """Return the largest count, including those that last no time at all."""
    return max(accumulate((delta for _, delta in _changes(spans)), initial=0))


def _changes(spans: Sequence[Span]) -> list[tuple[Time, int]]:
    changes: list[tuple[Time, int]] = []
    for span in spans:
        kinds = [kind for _, kind, _ in span.parts]
        changes += [(span.start, 1) for kind in kinds if kind == "F"]
        changes += [(span.end, -1) for kind in kinds if kind in ("B", "W")]
    # Stable: where one span ends and the next begins, the activation is freed before the next one is made.
    return sorted(changes, key=itemgetter(0))
