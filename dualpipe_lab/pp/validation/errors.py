"""`InvalidProgram`: all problems of a program, collected first and reported at once."""

from collections.abc import Iterable, Sequence

from dualpipe_lab.pp.program import Program

MAX_LISTED = 12


class InvalidProgram(ValueError):  # noqa: N818 - a name to read aloud
    """A program that deadlocks, or does not compute every gradient exactly once; `problems` lists why."""

    def __init__(self, name: str, problems: Sequence[str], total: int) -> None:
        self.problems = tuple(problems)
        lines = [f"  - {problem}" for problem in problems]
        if total > len(problems):
            lines.append(f"  - and {total - len(problems)} more")
        count = "1 problem" if total == 1 else f"{total} problems"
        super().__init__("\n".join([f"program {name!r} has {count}:", *lines]))
        self._arguments = (name, self.problems, total)

    def __reduce__(self) -> tuple[type["InvalidProgram"], tuple[str, tuple[str, ...], int]]:
        return type(self), self._arguments  # so that it crosses process borders


class ProblemList:
    """A bounded list of problems: the first `MAX_LISTED` are kept, the others counted."""

    def __init__(self) -> None:
        self.listed: list[str] = []
        self.total = 0

    def add(self, problem: str) -> None:
        """Add a problem, unless it is listed already."""
        if problem in self.listed:
            return
        self.total += 1
        if len(self.listed) < MAX_LISTED:
            self.listed.append(problem)

    def raise_if_any(self, program: Program) -> None:
        """Raise InvalidProgram if the list has a problem."""
        if self.total:
            raise InvalidProgram(program.name, self.listed, self.total)


def listing(numbers: Iterable[int], most: int = 6) -> str:
    """Write numbers in ascending order, at most `most` of them.

    >>> listing([3, 1, 2]), listing(range(10), most=3)
    ('1, 2, 3', '0, 1, 2 and 7 more')
    """
    ordered = sorted(numbers)
    shown = ", ".join(map(str, ordered[:most]))
    return shown if len(ordered) <= most else f"{shown} and {len(ordered) - most} more"
