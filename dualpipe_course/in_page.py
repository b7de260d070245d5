"""Python on a published page, which has neither torch nor processes: it judges an answer and runs an edited cell.

In: the cells of a page before the answer or the cell, the answer and its check or the cell, as text.  Out: what the
notebook prints, and the drawing that it shows.
A function of an answer runs where it is called; the page ends the whole of this Python when it takes too long.
"""

import ast
import io
import json
import traceback
from contextlib import redirect_stdout, suppress

from dualpipe_course.exercise import CheckFailed

ANSWER, CELL = "<your answer>", "<the cell>"


def judge(before: list[str], answer: str, check: str) -> str:
    """Run the cells before an answer, the answer and its check, and return what they print.

    What the cells before it import and this Python does not have is left out: an exercise that needs it is none of
    those that a page offers.
    """
    names: dict[str, object] = {"__name__": "__main__"}
    printed = io.StringIO()
    with redirect_stdout(printed):
        try:
            for cell in before:
                for statement in ast.parse(cell).body:
                    with suppress(ImportError):
                        exec(compile(ast.Module([statement], []), "<cell>", "exec"), names)  # noqa: S102
            printed.truncate(printed.seek(0))
            exec(compile(answer, ANSWER, "exec"), names)  # noqa: S102
            exec(compile(check, "<check>", "exec"), names)  # noqa: S102
        except CheckFailed as failed:
            print(failed)
        except BaseException as error:
            print(_in_words(error))
    return printed.getvalue()


def run(before: str, cell: str) -> str:
    """Run the statements that a cell needs, and the cell: JSON of what it prints, and of its last value's drawing."""
    names: dict[str, object] = {"__name__": "__main__"}
    printed, drawing = io.StringIO(), ""
    exec(before, names)  # noqa: S102
    with redirect_stdout(printed):
        try:
            body = ast.parse(cell, CELL).body
            last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
            exec(compile(ast.Module(body, []), CELL, "exec"), names)  # noqa: S102
            if isinstance(last, ast.Expr):
                drawing = _shown(eval(compile(ast.Expression(last.value), CELL, "eval"), names))  # noqa: S307
        except BaseException as error:
            print(_in_words(error, CELL))
    return json.dumps({"text": printed.getvalue(), "drawing": drawing})


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
