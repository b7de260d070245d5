"""The text of a solution's cell without the marks from which its exercise is made (`tools/make_exercises.py`)."""

import re

_MARKS = re.compile(r"^ *### (?:STUB\n.*?^ *### END|BEGIN|END) SOLUTION\n?", re.MULTILINE | re.DOTALL)


def without_marks(source: str) -> str:
    r"""Return a solution as it is written down elsewhere.

    >>> without_marks("### BEGIN SOLUTION\nx = 1\n### STUB\n# x = ...\n### END SOLUTION\n")
    'x = 1'
    """
    return _MARKS.sub("", source).strip()
