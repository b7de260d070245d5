"""What an exercise declares, by kind, and the one harness that judges it.

    numbers = Predict("interleaved-1", "A loop", ("makespan", "peak"), closed_form, "on {p} ranks", p=(4, 3), ...)
    program = Implement("interleaved-2", "Rows", "Write ...", cases=SIZES, judge=one_case, right="31 sizes", ...)
    summed  = Repair("ring-3", "A lost chunk", "Repair ...", cases=SIZES, run=on_a_rank, reference=one_process, ...)
    order   = Puzzle("gpipe-4", "Less memory", "Find ...", judge=of_the_order, ...)

An answer that runs is judged case by case, the smallest first: by a function of its own, or by what `run` returns on
every rank beside what `reference` returns for it, with limits on what it sends and keeps.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dualpipe_course import record
from dualpipe_course.differences import TOLERANCE
from dualpipe_course.exercise import Check, Kind
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import needs_function
from dualpipe_course.variants import Choice, Known, Variants

if TYPE_CHECKING:
    from torch import Tensor

    from dualpipe_course.comparison import Found, Limit, Numbers, Off


class Predict(Check):
    """Numbers that a closed form knows.

    Args:
        name: of the exercise.
        title: its heading.
        names: of the numbers.
        form: the numbers, from what is given.
        sentences: those of the text in which what is given stands, as `{p} ranks`.
        slips: wrong numbers that a known mistake leads to, each with what went wrong: by question pairs, computed
            from what is given, or a table for the book's numbers alone.
        called: what a message calls what is given.
        minutes, points, hints, trail: as of every check.
        given: what is given, by name: the book's number first, then those that a seed may draw.
    """

    kind = "predict"

    def __init__(
        self,
        name: str,
        title: str,
        names: tuple[str, ...],
        form: Callable[..., Sequence[Any] | None],
        /,
        *sentences: str,
        minutes: int,
        points: int,
        hints: tuple[str, ...],
        trail: bool = False,
        slips: Callable[..., Known] | Sequence[Mapping[Any, str]] = (),
        called: Mapping[str, str] | None = None,
        **given: Choice,
    ) -> None:
        asks = f"Predict: {', '.join(names)}."
        super().__init__(name, title, asks, minutes=minutes, points=points, hints=hints, trail=trail)
        self._numbers = Variants(names, form, *sentences, slips=slips, called=called, **given)
        self.variants = self._numbers if given else None

    def judge(self, *answers: Any, seed: int | None = None) -> str:
        """Compare numbers with those of the closed form."""
        (answer,) = answers
        topic, _, number = self.name.rpartition("-")
        seed = seed if self.variants else None
        return self._numbers.judge(answer, seed, f"check.{topic}.hint({number})")

    @property
    def slips(self) -> Sequence[Mapping[Any, str]]:
        """By question, the wrong numbers of the book that a known mistake leads to, each with what went wrong."""
        return self._numbers.slips()

    def hint(self, number: int) -> str:
        """A hint with the numbers that it is about, where the learner has others."""
        hint = super().hint(number)
        return self.variants.hint(hint) if self.variants and record.seed() is not None else hint


class Implement(Check):
    """A function or class to write.

    Args:
        name: of the exercise.
        title: its heading.
        asks: what to write.
        cases: arguments of each case, the smallest first.
        right: the line for a right answer; without it, what the last case returns.
        judge: called with the answers and a case's arguments: raises `Wrong`, may return the line.
        run: in place of `judge`: `run(rank, world_size, answer, *rest)` on every rank of a case `(ranks, *rest)`;
            returns tensors by name, or a `Found`.
        reference: `reference(rank, *case)` in one process: the same tensors.
        limits: what a case may cost, or a function of a case that returns it.
        why: what is wrong with a value, in words.
        named: a case in words, with its arguments in place of {}.
        tolerance: the error that is allowed, relative to the largest number; 0: none.
        without: what of the library is switched off while the answer runs; for `run` alone.
        about: minutes, points, hints, and whether it belongs to the trail.
    """

    kind: Kind = "implement"

    def __init__(
        self,
        name: str,
        title: str,
        asks: str,
        *,
        cases: Sequence[tuple[Any, ...]] = ((),),
        right: str = "",
        judge: Callable[..., str | None] | None = None,
        run: "Callable[..., Mapping[str, Tensor | None] | Found] | None" = None,
        reference: "Callable[..., Mapping[str, Tensor]] | None" = None,
        limits: "Sequence[Limit] | Callable[..., Sequence[Limit]]" = (),
        why: "Callable[[Off], str] | None" = None,
        named: str = "{} rank(s)",
        tolerance: float = TOLERANCE,
        without: Sequence[str] = (),
        **about: Any,
    ) -> None:
        super().__init__(name, title, asks, **about)
        self._cases, self._right, self._judge = cases, right, judge
        self._run, self._reference, self._limits, self._why = run, reference, limits, why
        self._named, self._without, self._tolerance = named, without, tolerance

    def judge(self, *answers: Any, seed: int | None = None) -> str:
        """Try every case."""
        for answer in answers:
            needs_function(answer)
        line = None
        for case in self._cases:
            line = (self._judge or self._beside)(*answers, *case)
        return self._right or line or ""

    def _beside(self, fn: Any, *case: Any) -> None:
        """Compare what the answer makes on ranks with what one process makes."""
        from dualpipe_course.comparison import compare_on_ranks

        assert self._run is not None
        reference = self._reference
        compare_on_ranks(
            _found,
            case[0],
            self._run,
            Without(fn, *self._without) if self._without else fn,
            case,
            case=self._named.format(*case),
            beside=None if reference is None else lambda: [_plain(reference(r, *case)) for r in range(case[0])],
            why=self._why,
            tolerance=self._tolerance,
            limits=self._limits(*case) if callable(self._limits) else self._limits,
        )


class Repair(Implement):
    """A function that is almost right: to find what is wrong with it."""

    kind = "find the bug"


class Puzzle(Check):
    """An order, a plan or a table within a budget: `judge` raises `Wrong` or returns the line for a right answer."""

    kind = "puzzle"

    def __init__(self, name: str, title: str, asks: str, *, judge: Callable[..., str], **about: Any) -> None:
        super().__init__(name, title, asks, **about)
        self._judge = judge

    def judge(self, *answers: Any, seed: int | None = None) -> str:
        """Judge the answer."""
        return self._judge(*answers)


def _found(rank: int, world_size: int, run: Callable[..., Any], fn: Any, case: tuple[Any, ...]) -> "Found":
    from dualpipe_course.comparison import Found

    made = run(rank, world_size, fn, *case[1:])
    return made if isinstance(made, Found) else Found(_plain(made))


def _plain(tensors: "Mapping[str, Tensor | None]") -> "dict[str, Numbers | None]":
    from dualpipe_course.comparison import Numbers

    return {name: Numbers.of(value) for name, value in tensors.items()}
