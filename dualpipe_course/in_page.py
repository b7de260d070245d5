"""Judging an answer on a published page, by the same checks: a browser's Python has neither torch nor processes.

In: the cells of an exercise page before the answer, the answer and its check, as text.  Out: what the notebook prints.
A function of an answer runs where it is called; the page ends the whole of this Python when it takes too long.
"""

import ast
import io
import traceback
from contextlib import redirect_stdout, suppress

from dualpipe_course.exercise import CheckFailed

ANSWER = "<your answer>"


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


def _in_words(error: BaseException) -> str:
    """Say what an answer raised and in which of its lines."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == ANSWER]
    if isinstance(error, SyntaxError) and error.filename == ANSWER:
        lines = [error.lineno]
    where = f", line {lines[-1]} of your answer" if lines else ""
    return f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}{where}"
