"""What the scripts have in common that ask another tool; they run in its own environment, which lacks this library."""

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

Inputs = dict[str, Any]


class CannotSay(Exception):  # noqa: N818
    """Why a tool cannot express a row."""


def refuse(inputs: Inputs, rules: Sequence[tuple[bool, str]]) -> None:
    """Raise the reasons that hold for a row, if there are any."""
    if found := [reason for holds, reason in rules if holds]:
        raise CannotSay("; ".join(found))


def main(answer: Callable[[Inputs], float]) -> None:
    """Answer the rows on stdin; what the tool prints goes to stderr."""
    rows, found = json.load(sys.stdin), list[float | str]()
    with contextlib.redirect_stdout(sys.stderr):
        for inputs in rows:
            try:
                found.append(answer(inputs))
            except CannotSay as reason:
                found.append(str(reason))
            except Exception as error:
                found.append(f"{type(error).__name__}: {' '.join(str(error).replace(';', ',').split())[:100]}")
    print(json.dumps(found))
