"""Python on a published page, which has neither torch nor processes: it judges an answer and runs an edited cell.

In: the cells of a page before the answer or the cell, the answer and its check or the cell, as text.  Out: JSON of the
verdict or the drawing that the notebook shows, and of what it prints, cut where that is too much for a page.
A function of an answer runs where it is called; the page ends the whole of this Python when it takes too long.
"""

import ast
import io
import json
import linecache
import traceback
from contextlib import redirect_stderr, redirect_stdout, suppress

from dualpipe_course.exercise import CheckFailed

ANSWER, CELL = "<your answer>", "<the cell>"


class Printed(io.TextIOBase):
    r"""Keeps the first lines of what is printed and counts the rest, so that a loop may print without end.

    >>> printed = Printed(most_lines=2)
    >>> print("a", "b", "c", "d", sep="\n", file=printed)
    >>> printed.text()
    'a\nb\n... and 2 more lines\n'
    """

    def __init__(self, most_lines: int = 200, most_signs: int = 20_000) -> None:
        self._kept: list[str] = []
        self._lines, self._signs, self._left_out, self._is_cut = most_lines, most_signs, 0, False

    def write(self, text: str) -> int:
        """Keep what there is room for."""
        size = len(text)
        if self._lines > 0 and self._signs > 0:
            lines = text.split("\n", self._lines)
            kept = text[: size - len(lines[-1]) if len(lines) > self._lines else size][: self._signs]
            self._kept.append(kept)
            self._signs -= len(kept)
            self._lines -= kept.count("\n")
            text = text[len(kept) :]
        self._left_out += text.count("\n")
        self._is_cut |= text != ""
        return size

    def text(self) -> str:
        """What was kept, and how much was not."""
        kept, number = "".join(self._kept), self._left_out
        if not self._is_cut:
            return kept
        end = "" if kept.endswith("\n") else "\n"
        return f"{kept}{end}... and {f'{number:,}' if number > 1 else 'one'} more line{'s' * (number > 1)}\n"


def judge(before: list[str], answer: str, check: str) -> str:
    """Run the cells before an answer, the answer and its check: JSON of the verdict, and of what the answer prints.

    What the cells before it import and this Python does not have is left out: an exercise that needs it is none of
    those that a page offers.
    """
    names: dict[str, object] = {"__name__": "__main__"}
    with redirect_stdout(io.StringIO()):
        for cell in before:
            for statement in ast.parse(cell).body:
                with suppress(ImportError):
                    exec(compile(ast.Module([statement], []), "<cell>", "exec"), names)  # noqa: S102
    printed = Printed()
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            linecache.cache[ANSWER] = (len(answer), None, answer.splitlines(keepends=True), ANSWER)
            exec(compile(answer, ANSWER, "exec"), names)  # noqa: S102
            said = _verdict(check, names)
        except BaseException as error:
            said = _in_words(error)
    return json.dumps({"verdict": said, "text": printed.text()})


def _verdict(check: str, names: dict[str, object]) -> str:
    """Return what a check's call prints, which an answer that prints would hide."""
    call = ast.parse(check, mode="eval").body
    assert isinstance(call, ast.Call)
    call.func = ast.copy_location(ast.Attribute(call.func, "verdict", ast.Load()), call.func)
    verdict = eval(compile(ast.Expression(call), "<check>", "eval"), names)  # noqa: S307
    return f"{verdict.name} solved: {verdict.message}" if verdict.passed else str(CheckFailed(verdict))


def run(before: str, cell: str) -> str:
    """Run the statements that a cell needs, and the cell: JSON of what it prints, and of its last value's drawing."""
    names: dict[str, object] = {"__name__": "__main__"}
    printed, drawing, failed = Printed(), "", ""
    exec(before, names)  # noqa: S102
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            body = ast.parse(cell, CELL).body
            last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
            exec(compile(ast.Module(body, []), CELL, "exec"), names)  # noqa: S102
            if isinstance(last, ast.Expr):
                drawing = _shown(eval(compile(ast.Expression(last.value), CELL, "eval"), names))  # noqa: S307
        except BaseException as error:
            failed = f"{_in_words(error, CELL)}\n"
    return json.dumps({"text": printed.text() + failed, "drawing": drawing})


def _shown(value: object) -> str:
    """Return a drawing as HTML for a page that has its script; print any other value."""
    from dualpipe_lab.timeline import Timeline
    from dualpipe_lab.viz import compare

    if isinstance(value, Timeline):
        value = compare(value)
    if hasattr(value, "to_html"):
        return str(value.to_html(script=False))
    if value is not None:
        print(repr(value))
    return ""


def _in_words(error: BaseException, source: str = ANSWER) -> str:
    """Say what an answer or a cell raised and in which of its lines."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == source]
    if isinstance(error, SyntaxError) and error.filename == source:
        lines = [error.lineno]
    where = f", line {lines[-1]} of {source[1:-1]}" if lines else ""
    return f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}{where}"
