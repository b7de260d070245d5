"""An exercise and its check: from an answer to a verdict that teaches.

In: a function that judges an answer, its title, kind, minutes, points and hints.  Out: a `Check` to call in a cell.
A right answer gives one line that is the same every time.  A wrong one raises `CheckFailed`, which shows the smallest
failing case, what was expected and why, and a picture where one helps.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dualpipe_course import record
from dualpipe_lab.timeline import Timeline

if TYPE_CHECKING:
    from dualpipe_course.variants import Variants

Kind = Literal["predict", "implement", "puzzle", "find the bug"]


class Wrong(Exception):  # noqa: N818 - it is a verdict, not an accident
    """Raised while judging: why the answer does not pass, its share of the points, and a picture."""

    stopped = False

    def __init__(self, message: str, score: float = 0.0, picture: Timeline | None = None) -> None:
        super().__init__(message)
        self.message, self.score, self.picture = message, score, picture


class OutOfTime(Wrong):
    """The answer was stopped at its limit of time."""

    stopped = True


@dataclass(frozen=True)
class Verdict:
    """What a check found: `score` is the earned share of the points, 0 to 1; the message is what the learner reads."""

    name: str
    passed: bool
    score: float
    message: str
    picture: Timeline | None = None
    stopped: bool = False  # at its limit of time


class CheckFailed(AssertionError):  # noqa: N818 - a name to read aloud
    """An answer did not pass; in a notebook the message is shown without a traceback."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        picture = "" if verdict.picture is None or _in_notebook() else f"\n{verdict.picture}"
        super().__init__(f"{verdict.name}: {verdict.message}{picture}")

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the lines of the check's own code would teach nothing."""
        return str(self).splitlines()


class NotRead(CheckFailed):
    """The cell that ran last has a SyntaxError: what it should define is still the answer of an earlier run."""

    def __init__(self, name: str, error: SyntaxError) -> None:
        self.error = error
        why = f"not judged, because the last cell that you ran has an error ({error.msg}, line {error.lineno})"
        super().__init__(Verdict(name, False, 0.0, f"{why}: repair the answer, run its cell, then this check"))


class About(NamedTuple):
    """What is known of an exercise before anybody answers it."""

    name: str
    title: str
    kind: Kind
    minutes: int
    points: int
    hints: tuple[str, ...]
    trail: bool = False  # one of the two of its page that the trail counts


class Check:
    """The check of one exercise: call it with the answer, and the seed of a learner with numbers of their own."""

    def __init__(self, judge: Callable[..., str], about: About, variants: "Variants | None" = None) -> None:
        self._judge, self.about, self.name, self.variants = judge, about, about.name, variants
        self.failed_at = 0.0  # when an answer failed, in this kernel, if none has passed since
        self.__doc__ = judge.__doc__

    @property
    def slips(self) -> Sequence[Mapping[Any, str]]:
        """By question, the wrong numbers of the book that a known mistake leads to, each with what went wrong."""
        return self.variants.slips() if self.variants else ()

    def verdict(self, *answers: Any, seed: int | None = None) -> Verdict:
        """Judge an answer without printing or recording anything."""
        judge = self._judge
        if seed is not None and self.variants is not None:
            topic, _, number = self.name.rpartition("-")
            judge = partial(self.variants.judge, seed=seed, hint=f"check.{topic}.hint({number})")
        try:
            return Verdict(self.name, True, 1.0, judge(*answers))
        except Wrong as wrong:
            return Verdict(self.name, False, wrong.score, wrong.message, wrong.picture, wrong.stopped)
        except Exception as error:
            why = f"the check cannot read this answer ({type(error).__name__}: {error})"
            return Verdict(self.name, False, 0.0, f"{why}; does it have the type and the shape that are asked for?")

    def __call__(self, *answers: Any, seed: int | None = None) -> None:
        """Judge an answer; print one line if it is right.

        Raises:
            CheckFailed: it is wrong; the message says what to look at.
        """
        __tracebackhide__ = True
        if error := _unread():
            raise NotRead(self.name, error)
        verdict = self.verdict(*answers, seed=seed)
        self.failed_at = 0.0 if verdict.passed else monotonic()
        if record.note(self.name, verdict.passed) and (folder := record.course_folder()):
            _update_start_page(folder)
        if verdict.passed:
            print(f"{self.name} solved: {verdict.message}")
            return
        if verdict.picture is not None and _in_notebook():
            from IPython.display import display

            display(verdict.picture)
        raise CheckFailed(verdict)


def exercise(
    name: str,
    title: str,
    kind: Kind,
    minutes: int,
    points: int,
    hints: tuple[str, ...],
    trail: bool = False,
    variants: "Variants | None" = None,
) -> Callable[[Callable[..., str]], Check]:
    """Make a check of a function that returns the line for a right answer and raises `Wrong` for a wrong one."""
    return lambda judge: Check(judge, About(name, title, kind, minutes, points, hints, trail), variants)


def hint_of(checks: list[Check], number: int | None) -> None:
    """Print the next hint for exercise `number`.

    Without a number it is for the exercise whose check failed last, solved before or not; if none has failed, for the
    first unsolved one, and those of the trail come first.
    """
    known = record.load()
    open_checks = [check for check in checks if not known.get(check.name, record.NOTHING).solved]
    open_checks.sort(key=lambda check: not check.about.trail)
    if (latest := max(checks, key=lambda check: check.failed_at)).failed_at:
        open_checks = [latest]
    if number is not None:
        open_checks = [check for check in checks if check.name.endswith(f"-{number}")]
        if not open_checks:
            raise ValueError(f"there is no exercise {number} here; use 1 to {len(checks)}")
    if not open_checks:
        print("everything here is solved")
        return
    check = open_checks[0]
    shown = min(known.get(check.name, record.NOTHING).hints, len(check.about.hints) - 1)
    record.note_hint(check.name, shown + 1)
    hint = check.about.hints[shown]
    if check.variants is not None and record.seed() is not None:
        hint = check.variants.hint(hint)
    print(f"{check.name}, hint {shown + 1} of {len(check.about.hints)}: {hint}")


def _unread() -> SyntaxError | None:
    """The error of the cell that ran last in this notebook, if Python could not read it, or if a check has said so."""
    if not _in_notebook():
        return None
    from IPython import get_ipython

    last = get_ipython().last_execution_result
    if last is not None and isinstance(last.error_in_exec, NotRead):
        return last.error_in_exec.error
    return last.error_before_exec if last is not None and isinstance(last.error_before_exec, SyntaxError) else None


def _update_start_page(folder: Path) -> None:
    with contextlib.suppress(Exception):  # whatever became of the folder or the checkout, the answer is right
        from dualpipe_course.workspace import start_page

        start_page.update(Path(__file__).parents[1], folder)


def _in_notebook() -> bool:
    import sys

    kernel = sys.modules.get("ipykernel.kernelapp")
    return kernel is not None and bool(kernel.IPKernelApp.initialized())
