"""What the commands read: schedules with their options, CSV files, and costs as exact numbers."""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import lcm
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias

import typer

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.cost import UNIT_COST, Cost
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.torch_csv import from_torch_csv
from dualpipe_lab.timeline.units import number

Options: TypeAlias = dict[str, int | str]
Ranks = Annotated[int, typer.Option(min=1, help="number of ranks, p")]
Microbatches = Annotated[int, typer.Option(min=1, help="number of microbatches, m")]

COST_KEYS = {"F": "F", "I": "I", "W": "W", "B": "B", "FB": "overlap", "latency": "latency", "transfer": "transfer"}
_PAIR = re.compile(r"\s*([^=\s]+)\s*=\s*(\S+)\s*")


class Wanted(NamedTuple):
    """A schedule as it was asked for: `gpipe`, `interleaved:num_chunks=3` or `mine.csv`, and its builder's options."""

    name: str
    options: Options

    @property
    def is_file(self) -> bool:
        """Whether it is a CSV file."""
        return self.name.lower().endswith(".csv")

    @property
    def takes(self) -> list[str]:
        """The options that its builder has."""
        return [] if self.is_file else schedules.options_of(self.name)

    def check(self) -> "Wanted":
        """Raise ValueError unless there is such a schedule with such options."""
        for option in self.options:
            if option not in self.takes:
                has = f"it has {', '.join(map(flag_of, self.takes))}" if self.takes else "it has none"
                raise ValueError(f"{self.name} has no option {flag_of(option)}; {has}")
        if not self.is_file:
            schedules.builder(self.name)
        return self

    def build(self, num_ranks: int, num_microbatches: int) -> Program:
        """Return the program; a file has the size that it has."""
        if self.is_file:
            return from_torch_csv(Path(self.name))
        return schedules.build(self.name, num_ranks, num_microbatches, **self.options)


def wanted(text: str) -> Wanted:
    """Read a schedule's name and the options behind its colon.

    >>> wanted("interleaved:num_chunks=3")
    Wanted(name='interleaved', options={'num_chunks': 3})
    """
    name, colon, rest = text.partition(":")
    if Wanted(text, {}).is_file or not colon:
        return Wanted(text, {})
    return Wanted(name, _read_pairs(rest, text))


def _read_pairs(text: str, whole: str) -> Options:
    found: Options = {}
    for pair in text.split(","):
        if (match := _PAIR.fullmatch(pair)) is None:
            raise ValueError(f"{whole!r}: {pair!r} is not option=value; write name:option=value,option=value")
        found[match[1].replace("-", "_")] = _value(match[2])
    return found


def split(words: Sequence[str]) -> tuple[list[str], Options]:
    """Tell names from what is meant for a schedule's builder: every --option that the command does not have itself.

    >>> split(["1f1b", "--num-chunks", "3", "interleaved", "--order=reversed"])
    (['1f1b', 'interleaved'], {'num_chunks': 3, 'order': 'reversed'})
    """
    names: list[str] = []
    found: Options = {}
    rest = list(words)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if not flag.startswith("-"):
            names.append(flag + equals + value)
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ValueError(
                    f"{flag} needs a value, and it is no option of this command; write {flag} 2 or see --help"
                )
            value = rest.pop(0)
        found[flag.lstrip("-").replace("-", "_")] = _value(value)
    return names, found


def _value(text: str) -> int | str:
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else text


def flag_of(option: str) -> str:
    """Write an option of a builder as the command line has it."""
    return f"--{option.replace('_', '-')}"


def read_cost(text: str | None) -> Cost:
    """Read F=1,I=1,W=1,FB=2.5 and so on, exactly; B is I + W and FB is F + B unless given.

    >>> read_cost("F=2.5, FB=7/2").overlap
    Fraction(7, 2)
    """
    found: dict[str, int | Fraction] = {}
    for pair in text.split(",") if text else ():
        match = _PAIR.fullmatch(pair)
        if match is None or match[1] not in COST_KEYS:
            raise ValueError(
                f"--cost: {pair!r} is not a cost; write {', '.join(COST_KEYS)} = a number, such as F=1,FB=2.5"
            )
        if COST_KEYS[match[1]] in found:
            raise ValueError(f"--cost names {match[1]} twice; give it once")
        found[COST_KEYS[match[1]]] = _exact(pair, match[2])
    return Cost(**found) if found else UNIT_COST


def _exact(pair: str, text: str) -> int | Fraction:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"--cost: {text!r} in {pair.strip()!r} is not a number; write 2, 2.5 or 5/2") from None
    return value.numerator if value.denominator == 1 else value


def costs_of(cost: Cost) -> dict[str, int | Fraction]:
    """Return the numbers of a cost by their names in `Cost`; those left open are left out."""
    return {name: value for name in COST_KEYS.values() if (value := getattr(cost, name)) is not None}


def whole_ticks(cost: Cost) -> tuple[Cost, int]:
    """Return the same costs in ticks of 1/n, and n, so that every cost is a whole number.

    >>> whole_ticks(Cost(F=Fraction(5, 2)))[1]
    2
    """
    costs = costs_of(cost)
    fine = lcm(*(Fraction(value).denominator for value in costs.values()))
    return Cost(**{name: int(value * fine) for name, value in costs.items()}), fine


def words_of(costs: Mapping[str, int | Fraction]) -> str:
    """Write costs as `--cost` reads them."""
    letters = {name: key for key, name in COST_KEYS.items()}
    return " ".join(f"{letters[name]}={number(value)}" for name, value in costs.items())
