"""A check: from an answer to a verdict that teaches.

In: what an exercise declares (`declared.py`).  Out: a `Check` to call in a cell.
A right answer gives one line that is the same every time.  A wrong one raises `CheckFailed`, which shows the smallest
failing case, what was expected and why, and a picture where one helps.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dualpipe_course import record
from dualpipe_course.wrong import Wrong
from dualpipe_lab.timeline import Timeline

if TYPE_CHECKING:
    from dualpipe_course.variants import Variants

Kind = Literal["predict", "implement", "puzzle", "find the bug", "part", "run"]


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
        picture = "" if verdict.picture is None or in_notebook() else f"\n{verdict.picture}"
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

    kind: Kind
    variants: "Variants | None" = None

    def __init__(
        self,
        name: str,
        title: str,
        asks: str,
        *,
        minutes: int,
        points: int,
        hints: tuple[str, ...],
        trail: bool = False,
    ) -> None:
        self.about = About(name, title, self.kind, minutes, points, hints, trail)
        self.name, self.__doc__ = name, asks
        self.failed_at = 0.0  # when an answer failed, in this kernel, if none has passed since

    def judge(self, *answers: Any, seed: int | None = None) -> str:
        """Return the line for a right answer.

        Raises:
            Wrong: for any other.
        """
        raise NotImplementedError

    @property
    def slips(self) -> Sequence[Mapping[Any, str]]:
        """By question, the wrong numbers of the book that a known mistake leads to, each with what went wrong."""
        return ()

    @property
    def shown(self) -> str:
        """Its name, as a learner reads it."""
        return self.name

    def hint(self, number: int) -> str:
        """One of the hints, as a learner reads it."""
        return self.about.hints[number]

    def verdict(self, *answers: Any, seed: int | None = None) -> Verdict:
        """Judge an answer without printing or recording anything."""
        try:
            return Verdict(self.shown, True, 1.0, self.judge(*answers, seed=seed))
        except Wrong as wrong:
            return Verdict(self.shown, False, wrong.score, wrong.message, wrong.picture, wrong.stopped)
        except Exception as error:
            why = f"the check cannot read this answer ({type(error).__name__}: {error})"
            return Verdict(self.shown, False, 0.0, f"{why}; does it have the type and the shape that are asked for?")

    def __call__(self, *answers: Any, seed: int | None = None) -> None:
        """Judge an answer; print one line if it is right.

        Raises:
            CheckFailed: it is wrong; the message says what to look at.
        """
        __tracebackhide__ = True
        if error := _unread():
            raise NotRead(self.shown, error)
        verdict = self.verdict(*answers, seed=seed)
        self.failed_at = 0.0 if verdict.passed else monotonic()
        if record.note(self.name, verdict.passed):
            update_start_page()
        if verdict.passed:
            print(f"{verdict.name} solved: {verdict.message}")
            return
        if verdict.picture is not None and in_notebook():
            from IPython.display import display

            display(verdict.picture)
        raise CheckFailed(verdict)


def hint_of(checks: list[Check], number: int | str | None) -> None:
    """Print the next hint for exercise `number`, or for the part of that name.

    Without a number it is for the exercise whose check failed last, solved before or not; if none has failed, for the
    first unsolved one, and those of the trail come first.
    """
    known = record.load()
    open_checks = [check for check in checks if not known.get(check.name, record.NOTHING).solved]
    open_checks.sort(key=lambda check: not check.about.trail)
    if (latest := max(checks, key=lambda check: check.failed_at)).failed_at:
        open_checks = [latest]
    if number is not None:
        open_checks = [one for one in checks if one.name.endswith(f"-{number}") or getattr(one, "part", "") == number]
        if not open_checks:
            known_here = [getattr(one, "part", "") or one.name.rpartition("-")[2] for one in checks]
            raise ValueError(f"there is no exercise {number} here; there are {', '.join(known_here)}")
    if not open_checks:
        print("everything here is solved")
        return
    check = open_checks[0]
    shown = min(known.get(check.name, record.NOTHING).hints, len(check.about.hints) - 1)
    record.note_hint(check.name, shown + 1)
    print(f"{check.name}, hint {shown + 1} of {len(check.about.hints)}: {check.hint(shown)}")


def _unread() -> SyntaxError | None:
    """The error of the cell that ran last in this notebook, if Python could not read it, or if a check has said so."""
    if not in_notebook():
        return None
    from IPython import get_ipython

    last = get_ipython().last_execution_result
    if last is not None and isinstance(last.error_in_exec, NotRead):
        return last.error_in_exec.error
    return last.error_before_exec if last is not None and isinstance(last.error_before_exec, SyntaxError) else None


def update_start_page() -> None:
    """Write the learner's start page anew, where there is one."""
    folder = record.course_folder()
    if folder is None or record.is_compared():
        return
    with contextlib.suppress(Exception):  # whatever became of the folder or the checkout, the answer is right
        from dualpipe_course.workspace import start_page

        start_page.update(Path(__file__).parents[1], folder)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    import sys

    kernel = sys.modules.get("ipykernel.kernelapp")
    return kernel is not None and bool(kernel.IPKernelApp.initialized())
