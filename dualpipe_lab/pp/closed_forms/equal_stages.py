"""The condition of most closed forms: equal stages and free links.

Chapter: book/pp.  In: a `Cost` per stage.  Out: the ticks that all stages share, or ValueError.
"""

from typing import NamedTuple

from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.timeline import Time


class StageTicks(NamedTuple):
    """The ticks of F, I, W, B and of an overlapped pair, equal on every stage."""

    F: Time
    I: Time  # noqa: E741 - the letters of the papers
    W: Time
    B: Time
    pair: Time


def stage_ticks(schedule: str, num_stages: int, cost: Cost) -> StageTicks:
    """Return the ticks that all stages share; ValueError for unequal stages, slow links, or pairs of many lengths.

    >>> stage_ticks("1F1B", 4, Cost(F=[2, 2, 2, 2]))
    StageTicks(F=2, I=1, W=1, B=2, pair=4)
    """
    table = cost.per_stage(num_stages)
    refused = [f"{kind}={ticks}" for kind, ticks in table.items() if len(set(ticks)) > 1]
    refused += [f"{name}={ticks}" for name in ("latency", "transfer") if (ticks := getattr(cost, name))]
    if callable(cost.overlap):
        refused.append("a function as overlap")
    if refused:
        raise ValueError(
            f"{schedule} has a closed form for equal stages, equal pairs and free links only, "
            f"got {', '.join(refused)}; use simulate()"
        )
    one = {kind: ticks[0] for kind, ticks in table.items()}
    pair = one["F"] + one["B"] if cost.overlap is None or callable(cost.overlap) else cost.overlap
    return StageTicks(one["F"], one["I"], one["W"], one["B"], pair)
