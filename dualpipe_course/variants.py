"""Personal numbers: a seed draws the numbers of a predict exercise, so that a neighbour's answer is no use.

In: what is asked for, its closed form, the sentences of the exercise's text that have numbers in them, what each
number may be, the book's first, what a message calls it, and closed forms of known slips.  Out: by seed, the numbers,
their answers, the slips and the text; without a seed all is as in the book.
The seed is a learner's (`my-course` has one, a browser makes one) and travels with the notebook: its metadata have it
for the grader, its checks of such exercises for the kernel, as `check.interleaved.numbers((...), seed=4711)`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import product
from string import Formatter
from typing import Any, TypeAlias

from dualpipe_course.plain import plain
from dualpipe_course.trial import needs_ints
from dualpipe_course.wrong import Wrong

Number: TypeAlias = int | float
Numbers: TypeAlias = dict[str, Number]
Choice: TypeAlias = Sequence[Number] | Callable[..., Number]  # a function makes a number of those before it
Known: TypeAlias = Sequence[Sequence[tuple[Number, str]]]  # by question: wrong numbers, each with its slip

WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
MOST = 40  # variants of an exercise: a page has them all
STRIDE = 7919  # a prime: neighbours among the variants differ in more than one number


class Variants:
    """The variants of one exercise: all combinations with whole answers that no other combination has.

    >>> sum_of = Variants(("sum",), lambda a, b: (a + b,), "{a} and {b} apples", a=(1,), b=(1, 5))
    >>> sum_of.text("Add 1 and 1 apples.", 1), sum_of.answers(1)
    ('Add 1 and 5 apples.', [6])
    >>> sum_of.judge([6], seed=1)
    'sum 6'
    """

    def __init__(
        self,
        names: tuple[str, ...],
        closed_form: Callable[..., Sequence[Any] | None],
        /,
        *sentences: str,
        slips: Callable[..., Known] | Sequence[Mapping[Any, str]] = (),
        called: Mapping[str, str] | None = None,
        **of: Choice,
    ) -> None:
        self._names, self._closed_form, self._sentences, self._of = names, closed_form, sentences, of
        self._slips, self._called = slips, called or {}

    @cached_property
    def all(self) -> list[Numbers]:
        """The numbers of every variant; the book's are none of them."""
        free = {name: choice for name, choice in self._of.items() if not callable(choice)}
        found: dict[tuple[int, ...], Numbers] = {tuple(self._answers(self.book) or ()): self.book}
        for values in product(*free.values()):
            numbers = self._with_derived(dict(zip(free, values, strict=True)))
            if answers := self._answers(numbers):
                found.setdefault(tuple(answers), numbers)
        drawn = list(found.values())[1:]
        return [drawn[number * STRIDE % len(drawn)] for number in range(min(MOST, len(drawn)))]

    @cached_property
    def book(self) -> Numbers:
        """The numbers of the book."""
        return self._with_derived({name: choice[0] for name, choice in self._of.items() if not callable(choice)})

    def numbers(self, seed: int | None) -> Numbers:
        """The numbers of a seed."""
        return self.book if seed is None else self.all[seed % len(self.all)]

    def answers(self, seed: int | None) -> list[int]:
        """The answers that the closed form gives for the numbers of a seed."""
        answers = self._answers(self.numbers(seed))
        assert answers, f"{self._names}: the closed form gives no whole numbers for {self.numbers(seed)}"
        return answers

    def slips(self, seed: int | None = None) -> list[dict[float, str]]:
        """By question, the wrong numbers that a known mistake leads to, each with what went wrong.

        A number that is right all the same, or that two mistakes lead to, tells nothing and is left out.
        """
        if not callable(self._slips):
            of_book = self._slips if seed is None else ()
            return [dict(known) for known in of_book] or [{} for _ in self._names]
        of_question = zip(self._slips(**self.numbers(seed)), self.answers(seed), strict=True)
        return [_told_apart(known, right) for known, right in of_question]

    def sentences(self, seed: int | None) -> list[str]:
        """The sentences of the text that have numbers in them."""
        return [sentence.format(**self.numbers(seed)) for sentence in self._sentences]

    def text(self, text: str, seed: int) -> str:
        """Return a text of the book with the numbers of a seed."""
        for old, new in zip(self.sentences(None), self.sentences(seed), strict=True):
            text = text.replace(old, new)
        return text

    def hint(self, hint: str) -> str:
        """Return a hint with the numbers that it is about."""
        return f"{self.of_book}: {hint}"

    def judge(self, answer: object, seed: int | None, hint: str = "") -> str:
        """Return the line for a right answer; `hint` is the call that gives one.

        Raises:
            Wrong: a number is another one.  What is known of this slip is told, otherwise, with a seed, the book's own
                number, on which a learner can try the same way.
        """
        slips, answers = self.slips(seed), self.answers(seed)
        found = needs_ints(answer, self._names, slips)
        for place, (name, value) in enumerate(zip(self._names, found, strict=True)):
            if value != answers[place]:
                raise Wrong(
                    f"{name}, {value}: " + (slips[place].get(value) or self._in_general(place, value, seed, hint))
                )
        return ", ".join(f"{name} {value:,}" for name, value in zip(self._names, answers, strict=True))

    def _in_general(self, place: int, value: int, seed: int | None, hint: str) -> str:
        if seed is None:
            return f"this is another number; {hint} says how to begin"
        of_book = self.answers(None)[place]
        if self.answers(seed)[place] == of_book:  # the book's number would be the answer
            drawn = {self.answers(number)[place] for number in range(len(self.all))}
            why = "does not depend on the numbers that are drawn" if drawn == {of_book} else "is the same in the book"
            return f"this one {why}; {hint} has a hint"
        if value == of_book:
            return f"that is right {self.of_book}; yours are others"
        return f"{self.of_book}, it is {of_book:,}; does your way lead there? The hints are about these numbers too"

    @cached_property
    def of_book(self) -> str:
        """The numbers of the book by name, in the order of the text."""
        named = {
            name: f"{self._called.get(name, name)} {self.book[name]:{spec}}".strip()
            for sentence in self._sentences
            for _, name, spec, _ in Formatter().parse(sentence)
            if name
        }
        return ", ".join(["with the book's numbers", *named.values()])

    def _with_derived(self, numbers: Numbers) -> Numbers:
        for name, choice in self._of.items():
            if callable(choice):
                numbers[name] = choice(**numbers)
        return numbers

    def _answers(self, numbers: Numbers) -> list[int] | None:
        """The answers; None where the closed form has none, or where they are no whole numbers."""
        found = self._closed_form(**numbers)
        answers = None if found is None else plain(found)
        return answers if answers and all(type(one) is int for one in answers) else None


def _told_apart(known: Sequence[tuple[Number, str]], right: int) -> dict[float, str]:
    found: dict[float, set[str]] = {}
    for value, sentence in known:
        found.setdefault(plain(value), set()).add(sentence)
    return {value: sentences.pop() for value, sentences in found.items() if value != right and len(sentences) == 1}
