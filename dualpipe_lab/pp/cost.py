"""`Cost`: the ticks of each kind of work on each stage, and of the links between ranks.

Chapter: book/pp/gpipe.  In: numbers, per-stage sequences or mappings.  Out: an immutable `Cost`.
  B = I + W unless given; an overlapped pair costs its forward plus its backward unless given
  a message arrives `transfer` + `latency` after the link is free for it
Ticks are integers, so that Python, JavaScript and closed forms agree to the last digit; `Fraction` works too.
A float is refused: 0.1 + 0.2 is not 0.3, so the simulation would no longer be exact.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational
from typing import Any, NamedTuple, TypeAlias

from dualpipe_lab.pp.program import Overlap, ProgramStep
from dualpipe_lab.timeline import Time
from dualpipe_lab.timeline.json_form import PER_PAIR, pack

PerStage: TypeAlias = Time | Sequence[Time] | Mapping[int, Time]


@dataclass(frozen=True)
class Cost:
    """Ticks of F, I, W and B on each stage, of overlapped pairs, and of the links.

    `F`, `I`, `W`, `B`: one number for every stage, a sequence with one number per stage, or a mapping from stage.
    `overlap`: one number for every pair, or a function from an `Overlap` to ticks.
    `latency`: ticks from the end of a message's transfer to its arrival.  `transfer`: ticks for which a message
    occupies its directed link (source rank to destination rank); messages on a link queue first in, first out.
    Raises ValueError for floats, negative numbers, and a sequence or mapping that does not fit the stages.

    >>> Cost(F=1, I=1, W=1).per_stage(num_stages=2)["B"]
    [2, 2]
    """

    F: PerStage = 1
    I: PerStage = 1  # noqa: E741 - the letter of the papers
    W: PerStage = 1
    B: PerStage | None = None
    overlap: Time | Callable[[Overlap], Time] | None = None
    latency: Time = 0
    transfer: Time = 0

    def __post_init__(self) -> None:
        for name in ("F", "I", "W", "B"):
            value = getattr(self, name)
            values = value.values() if isinstance(value, Mapping) else value if isinstance(value, Sequence) else [value]
            for number in values:
                if value is not None:
                    _check(name, number)
        for name in ("latency", "transfer"):
            _check(name, getattr(self, name))
        if self.overlap is not None and not callable(self.overlap):
            _check("overlap", self.overlap)

    def per_stage(self, num_stages: int) -> dict[str, list[Time]]:
        """Return the ticks of F, B, I and W, each as one list over the stages."""
        table = {kind: _spread(kind, getattr(self, kind), num_stages) for kind in ("F", "I", "W")}
        input_and_weight = [i + w for i, w in zip(table["I"], table["W"], strict=True)]
        table["B"] = input_and_weight if self.B is None else _spread("B", self.B, num_stages)
        return table

    def of(self, step: ProgramStep, table: Mapping[str, Sequence[Time]]) -> Time:
        """Return the ticks of an action or a pair; `table` is what `per_stage` returned."""
        return self.of_pair(step, table) if isinstance(step, Overlap) else table[step.kind][step.stage]

    def of_pair(self, pair: Overlap, table: Mapping[str, Sequence[Time]]) -> Time:
        """Return the ticks of one overlapped pair; `table` is what `per_stage` returned."""
        if self.overlap is None:
            forward, backward = pair
            return table[forward.kind][forward.stage] + table[backward.kind][backward.stage]
        if callable(self.overlap):
            return _check(f"overlap of {pair}", self.overlap(pair))
        return self.overlap

    def to_dict(self, num_stages: int) -> dict[str, Any]:
        """Return the costs as JSON values, from which a page can compute a timeline again.

        F, I, W and B are one number or one per stage; B and overlap are None by default; a fraction is the text "3/2";
        overlap is "per pair" if it is a function.

        >>> Cost(F=[1, 2], latency=3).to_dict(num_stages=2)["F"]
        [1, 2]
        """
        ticks = {kind: _plain(kind, getattr(self, kind), num_stages) for kind in ("F", "I", "W", "B")}
        overlap = PER_PAIR if callable(self.overlap) else _plain("overlap", self.overlap, num_stages)
        return {**ticks, "overlap": overlap, "latency": pack(self.latency), "transfer": pack(self.transfer)}


def _plain(name: str, value: PerStage | None, num_stages: int) -> Any:
    if value is None:
        return None
    if isinstance(value, (Mapping, Sequence)):
        return [pack(ticks) for ticks in _spread(name, value, num_stages)]
    return pack(value)


def _spread(name: str, value: PerStage, num_stages: int) -> list[Time]:
    if isinstance(value, Mapping):
        if missing := [stage for stage in range(num_stages) if stage not in value]:
            raise ValueError(f"Cost.{name} has no entry for stage {missing[0]} of {num_stages}; add it")
        return [value[stage] for stage in range(num_stages)]
    if isinstance(value, Sequence):
        if len(value) != num_stages:
            raise ValueError(f"Cost.{name} lists {len(value)} stages, the program has {num_stages}; give one per stage")
        return list(value)
    return [value] * num_stages


def _check(name: str, number: object) -> Time:
    if not isinstance(number, Rational):
        raise ValueError(
            f"Cost.{name} must be an exact number, got {number!r}; scale all costs to integer ticks "
            "(0.5 and 1 become 1 and 2) or use fractions.Fraction"
        )
    if number < 0:
        raise ValueError(f"Cost.{name} must not be negative, got {number}; use 0 for work that takes no time")
    return number if isinstance(number, (int, Fraction)) else Fraction(number)


UNIT_COST = Cost()  # F = I = W = 1, B = 2, F&B = 3, free links: the teaching default


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
