"""Machines whose numbers are found from a few measured steps: one number per step, by bisection.

Chapter: book/whole/predictions.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from dualpipe_lab.plan import Cluster, Efficiency, TimeRules


def with_products(cluster: Cluster, part: float) -> Cluster:
    """The same cluster, whose products reach this part of the peak, whatever their size."""
    return replace(cluster, accelerator=replace(cluster.accelerator, efficiency=Efficiency(part, "measured")))


def with_inside(cluster: Cluster, part: float) -> Cluster:
    """The same cluster, whose links inside of a node reach this part of their bandwidth."""
    return replace(cluster, inside=replace(cluster.inside, efficiency=Efficiency(part, "measured")))


def with_attention(rules: TimeRules, factor: float) -> TimeRules:
    """The same rules, with attention that reaches this part of what they say."""
    curves = [
        Efficiency(origin="measured", points=tuple((size, min(1.0, part * factor)) for size, part in one.points))
        for one in rules.attention
    ]
    return replace(rules, attention=(curves[0], curves[1]))


def solve(seconds_of: Callable[[float], float], measured: float, low: float, high: float) -> float:
    """The number at which falling seconds equal the measured ones."""
    for _ in range(20):
        middle = (low + high) / 2
        if seconds_of(middle) > measured:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def ranks(values: Sequence[float]) -> list[int]:
    """The place of each value in ascending order."""
    order = sorted(range(len(values)), key=values.__getitem__)
    places = [0] * len(values)
    for place, index in enumerate(order):
        places[index] = place
    return places


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's, for values without ties.

    >>> rank_correlation([1.0, 2.0, 3.0], [2.0, 4.0, 9.0])
    1.0
    """
    count = len(one)
    squares = sum((a - b) ** 2 for a, b in zip(ranks(one), ranks(other), strict=True))
    return 1 - 6 * squares / (count * (count**2 - 1))
