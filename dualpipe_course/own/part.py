"""`Part`: the check of a part of the learner's trainer, on ranks, over the parts before it.

    ring = Part("ranks-5", "ring", "Sums on a ring", "Write ...", names=("all_reduce", ...), right="...", trials=(
        OnRanks(summed, ((1, 3), (2, 4)), expected, "{1} numbers on {0} rank(s)"),
        Alone(rows, ((2, 3), (4, 8)), "{} stages, {} microbatches")), ...)

What is judged is a text: that of the cell which defined the answer, that of the file, or one that is given.  It runs
as `mine.<part>` on ranks alone, the kernel only reads it.
"""

import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import getitem
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.differences import TOLERANCE
from dualpipe_course.exercise import Check, CheckFailed, Kind, Verdict, update_start_page
from dualpipe_course.own import finder, folder
from dualpipe_course.own.parts import before
from dualpipe_course.own.rules import check_text
from dualpipe_course.trial import call_each, on_ranks
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from torch import Tensor

    from dualpipe_course.comparison import Found, Limit, Off

Texts = Mapping[str, str]  # of a part and of those before it, by name


class OnRanks(NamedTuple):
    """Cases on real ranks beside one process.

    Attributes:
        run: `run(rank, world_size, *rest)` on every rank of a case `(ranks, *rest)`; imports the part inside.  Returns
            tensors by name, or a `Found`.
        cases: the smallest first.
        reference: `reference(rank, *case)` in a process that knows no part: the same tensors.
        named: a case in words, with its values in place of {}.
        limits: what a case may cost, or a function of a case that returns it.
        why: what is wrong with a value, in words.
        tolerance: the error that is allowed, relative to the largest number.
        options: of the launch, such as `clock` and `link`.
    """

    run: "Callable[..., Mapping[str, Tensor | None] | Found]"
    cases: Sequence[tuple[Any, ...]]
    reference: "Callable[..., Mapping[str, Tensor]] | None" = None
    named: str = "{} rank(s)"
    limits: "Sequence[Limit] | Callable[..., Sequence[Limit]]" = ()
    why: "Callable[[Off], str] | None" = None
    tolerance: float = TOLERANCE
    options: Mapping[str, Any] = MappingProxyType({})


class Alone(NamedTuple):
    """Cases that need no ranks and no torch.

    Attributes:
        look: `look(*case)` imports the part inside, and returns what is wrong in words, or an empty string.
        cases: the smallest first.
        named: a case in words.
    """

    look: Callable[..., str]
    cases: Sequence[tuple[Any, ...]]
    named: str


class Part(Check):
    """A part of the learner's trainer.

    Args:
        name: of the exercise.
        part: the part, a key of `PARTS`.
        title: its heading.
        asks: what to write.
        names: what the text must define.
        trials: cases, the smallest first.
        right: the line for a right answer.
        off: what may not be used, as dotted names (`rules.py`).
        about: minutes, points, hints.
    """

    kind: Kind = "part"

    def __init__(
        self,
        name: str,
        part: str,
        title: str,
        asks: str,
        *,
        names: Sequence[str],
        trials: Sequence[OnRanks | Alone],
        right: str,
        off: Sequence[str] = (),
        **about: Any,
    ) -> None:
        super().__init__(name, title, asks, trail=True, **about)
        self.part, self.names, self.off, self.trials, self._right = part, names, off, trials, right

    @property
    def shown(self) -> str:
        """As its heading has it."""
        return f"part {self.part}"

    def __call__(self, *answers: Any, seed: int | None = None, take: str = "") -> None:
        """Judge the text of a cell or of the file; one that passes becomes the file.

        Args:
            answers: what the cell defines, such as a function of the part.
            seed: of no use here.
            take: "cell" or "file", where both have changed.
        """
        __tracebackhide__ = True
        try:
            if not answers and take != "file":
                raise Wrong(f'give a function of your cell, {self.names[-1]}, or say take="file"')
            text = folder.choose(self.part, "" if take == "file" else text_of(answers[0]), take)
        except Wrong as wrong:
            raise CheckFailed(Verdict(self.shown, False, 0.0, wrong.message)) from None
        folder.name_official(part for part in before(self.part) if f"mine.{part} " in text)
        super().__call__(text)
        if place := folder.keep(self.part, text):
            print(f"it is {place} now")
        finder.forget()
        update_start_page()
        _show_ours(self.part)

    def judge(self, *answers: Any, seed: int | None = None) -> str:
        """Try every case with the text of an answer, over the parts before it."""
        text = text_of(answers[0])
        check_text(self.part, text, self.names, self.off)
        texts = {part: folder.text(part) for part in before(self.part)} | {self.part: text}
        for trial in self.trials:
            if isinstance(trial, Alone):
                _try_alone(trial, self.part, texts)
            else:
                _try_on_ranks(trial, self.part, texts)
        return self._right


def text_of(answer: Any) -> str:
    """The text of the cell, or of the file, that has defined an answer.

    Raises:
        Wrong: it was not defined in a cell.
    """
    if isinstance(answer, str):
        return answer
    code = next((one.__code__ for one in _functions(answer)), None)
    lines = linecache.getlines(code.co_filename) if code else []
    if not lines:
        raise Wrong("pass a function or a class of your cell itself, such as check.ranks.ring(all_reduce)")
    return "".join(lines)


def _functions(answer: Any) -> list[Any]:
    found = list(vars(answer).values()) if isinstance(answer, type) else [answer]
    found = [inspect.unwrap(one.__func__ if isinstance(one, staticmethod | classmethod) else one) for one in found]
    return [one for one in found if hasattr(one, "__code__")]


def _try_alone(trial: Alone, part: str, texts: Texts) -> None:
    """Look at every case in one fresh process."""
    cases = [(trial.look, part, texts, case) for case in trial.cases]
    for case, (fine, value) in zip(trial.cases, call_each(_look, cases), strict=True):
        if not fine or value:
            raise Wrong(f"{trial.named.format(*case)}: {value}")


def _look(look: Callable[..., str], part: str, texts: Texts, case: tuple[Any, ...]) -> str:
    _install(part, texts)
    try:
        return look(*case)
    finally:
        finder.install(folder.text_of)  # on a page this process goes on


def _try_on_ranks(trial: OnRanks, part: str, texts: Texts) -> None:
    """Compare what the part makes on ranks with what one process makes."""
    from dualpipe_course.comparison import compare_on_ranks

    expected = None
    if trial.reference is not None:
        what = "the reference, which knows no part"
        expected = on_ranks(_expected, 1, trial.reference, list(trial.cases), case=what)[0]
    for number, case in enumerate(trial.cases):
        compare_on_ranks(
            _found,
            case[0],
            trial.run,
            part,
            texts,
            case[1:],
            case=trial.named.format(*case),
            beside=None if expected is None else partial(getitem, expected, number),
            why=trial.why,
            tolerance=trial.tolerance,
            limits=trial.limits(*case) if callable(trial.limits) else trial.limits,
            **trial.options,
        )


def _expected(rank: int, world_size: int, reference: Callable[..., Any], cases: list[tuple[Any, ...]]) -> Any:
    from dualpipe_course.comparison import Numbers

    plain = [[reference(of, *case) for of in range(case[0])] for case in cases]
    return [[{name: Numbers.of(value) for name, value in one.items()} for one in ranks] for ranks in plain]


def _found(
    rank: int, world_size: int, run: Callable[..., Any], part: str, texts: Texts, rest: tuple[Any, ...]
) -> "Found":
    from dualpipe_course.comparison import Found, Numbers

    _install(part, texts)
    made = run(rank, world_size, *rest)
    if isinstance(made, Found):
        return made
    return Found({name: Numbers.of(value) for name, value in made.items()})


def _install(part: str, texts: Texts) -> None:
    def find(name: str) -> str:
        if name not in texts:
            raise ImportError(f"mine.{name} comes later than {part}, which imports earlier parts alone")
        return texts[name]

    finder.install(find)


def _show_ours(part: str) -> None:
    """Below the line of a part that passes, the course's own; nothing where outputs are stored and compared."""
    if folder.folder() is None:
        return
    from html import escape

    from IPython.display import HTML, display

    text = finder.official(part)
    lines = len([line for line in text.splitlines() if line.strip()])
    display(HTML(f"<details><summary>Ours, {lines} lines</summary><pre>{escape(text)}</pre></details>"))
