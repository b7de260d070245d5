"""`Variant`: a schedule with options for its builder, written `interleaved:num_virtual_stages=4`.

Chapter: book/pp/explorer.  In: a name and options.  Out: programs of any size, and a title that tells variants apart.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.program import Program

_PAIR = re.compile(r"\s*([\w-]+)\s*=\s*(\S+)\s*")
_COUNT = "num_"


class Variant(NamedTuple):
    """A schedule of the registry with options for its builder.

    >>> str(Variant("1F1B", {}))
    '1F1B'
    """

    name: str
    options: dict[str, Any]

    @property
    def takes(self) -> list[str]:
        """The names of its builder's options; ValueError for an unknown schedule."""
        return schedules.options_of(self.name)

    def has(self, option: str) -> bool:
        """Return whether the variant's builder has an option; `virtual-stages` also means `num_virtual_stages`."""
        return self._full(option) is not None

    def with_options(self, options: Mapping[str, Any]) -> "Variant":
        """Return the variant with further options; ValueError for an option that its builder does not have.

        Options that the variant has already keep their values.
        """
        full = {self._full(option) or self._refuse(option): value for option, value in options.items()}
        return self._replace(options=full | self.options)

    def build(self, num_ranks: int, num_microbatches: int) -> Program:
        """Return the program of one size; ValueError as its builder."""
        return schedules.build(self.name, num_ranks, num_microbatches, **self.options)

    def title(self, program: Program) -> str:
        """Return the program's name, with the options in brackets.

        >>> Variant("x", {"num_virtual_stages": 4, "in_flight": 5}).title(Program("Loop", []))
        'Loop (4 virtual stages, in flight 5)'
        """
        words = [_words(option, value) for option, value in self.options.items()]
        return f"{program.name} ({', '.join(words)})" if words else program.name

    def __str__(self) -> str:
        pairs = ",".join(f"{option}={value}" for option, value in self.options.items())
        return f"{self.name}:{pairs}" if pairs else self.name

    def _full(self, option: str) -> str | None:
        name = option.replace("-", "_")
        return next((known for known in (name, _COUNT + name) if known in self.takes), None)

    def _refuse(self, option: str) -> str:
        has = f"it has {', '.join(self.takes)}" if self.takes else "it has none"
        raise ValueError(f"{self.name} has no option {option.replace('-', '_')}; {has}")


def variant(text: str) -> Variant:
    """Read `name` or `name:option=value,option=value`; ValueError for an unknown name or option.

    >>> variant("gpipe").build(2, 3)
    <Program 'GPipe': 2 ranks, 2 stages, 3 microbatches>
    """
    name, colon, rest = text.partition(":")
    options: dict[str, Any] = {}
    for pair in rest.split(",") if colon else ():
        if (match := _PAIR.fullmatch(pair)) is None:
            raise ValueError(f"{text!r}: {pair!r} is not option=value; write name:option=value,option=value")
        options[match[1]] = read_value(match[2])
    schedules.named(name)
    return Variant(name, {}).with_options(options)


def read_value(text: str) -> int | str:
    """Return the value of an option: an integer if the text is one, otherwise the text."""
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else text


def _words(option: str, value: object) -> str:
    plain = option.removeprefix(_COUNT).replace("_", " ")
    return f"{value} {plain}" if option.startswith(_COUNT) else f"{plain} {value}"
