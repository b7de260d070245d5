"""Exercises of "Two tokens at once": four numbers, packed documents.

Chapter: book/whole/two-tokens.  Messages are compared as sets, rows number by number.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from dualpipe_course.declared import Predict, Repair
from dualpipe_course.plain import plain
from dualpipe_course.trial import call_each, ended
from dualpipe_course.wrong import Wrong

NAMES = (
    "second targets",
    "second targets with two documents",
    "ranks with rows of the table",
    "messages under DualPipe",
)
_SLIPS: tuple[dict[int, str], ...] = (
    {
        600: "the last position of a sequence has no second target",
        588: "only one position of a sequence is without a second target: its next token has a target",
        599: "every sequence has a last position, not only the last sequence",
    },
    {
        588: "three positions of a sequence have no target: the two before the masked ones, and the last",
        594: "a masked target is also the second target of the position before",
        576: "the last position counts once: it has no second target, masked or not",
    },
    {
        2: "these are the stages; each is shared along tp and copied along dp",
        4: "two stages hold the table: the first for the input, the last for the extra layer",
        16: "stages in the middle have no use for the table",
    },
    {
        1: "look at which stages one rank holds under DualPipe",
        2: "both copies are on one rank, which adds them without a message",
    },
)


def right_rows(documents: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return ids, targets, next ids and second targets; a document's last targets are missing.

    >>> right_rows([[5, 6, 7], [1, 2]])
    [[5, 6, 7, 1, 2], [6, 7, -100, 2, -100], [6, 7, 0, 2, 0], [7, -100, -100, -100, -100]]
    """
    found: list[list[int]] = [[], [], [], []]
    for document in documents:
        tokens, none = list(document), [-100, -100]
        parts = tokens, tokens[1:] + none[:1], [*tokens[1:], 0], (tokens[2:] + none)[: len(tokens)]
        for row, part in zip(found, parts, strict=True):
            row += part
    return found


def _rows_fault(documents: list[list[int]], is_fine: bool, value: Any) -> str | None:
    words = f"documents {documents}"
    if not is_fine:
        return ended(words, value)
    expected = right_rows(documents)
    if not isinstance(value, list) or len(value) != 4:
        return f"{words}: expected four rows: ids, targets, next ids, second targets"
    ends = set(accumulate(map(len, documents)))
    for name, row, right in zip(("ids", "targets", "next ids", "second targets"), value, expected, strict=True):
        if not isinstance(row, list) or len(row) != len(right):
            return f"{words}: the row of {name} needs {len(right)} numbers, got {row!r:.60}"
        for place, (got, wanted) in enumerate(zip(row, right, strict=True)):
            if got != wanted:
                where = "the last of its document" if place + 1 in ends else f"at place {place} of the sequence"
                return f"{words}: {name}, position {place}: got {got}, expected {wanted}; this token is {where}"
    return None


def _judge_packed(fn: Callable[..., Any]) -> str:
    cases: list[tuple[list[list[int]]]] = [
        ([[5, 6, 7, 8]],),
        ([[5, 6, 7], [1, 2, 3, 4]],),
        ([[9, 8], [7, 6, 5], [4, 3]],),
        ([[4, 4, 4], [4, 4], [4, 4, 4, 4]],),
        ([[3], [1, 2, 3], [7]],),
    ]
    for (documents,), (is_fine, value) in zip(cases, call_each(fn, cases), strict=True):
        if (fault := _rows_fault(documents, is_fine, plain(value))) is not None:
            raise Wrong(fault)
    return f"{len(cases)} sequences: no row looks across the end of a document"


numbers = Predict(
    "two_tokens-1",
    "Targets and tables",
    NAMES,
    lambda sequences, length, **_: (sequences * (length - 1), sequences * (length - 3), 8, 0),
    "with {sequences} sequences of {length} tokens",
    "documents of {half} tokens",
    "the positions {end} and {last} are",
    minutes=8,
    points=1,
    hints=(
        "Write the targets of one sequence in a row and move the row by one place to the left.",
        "The table is sharded along tp and copied along dp, on every stage that uses it.",
        "Under DualPipe the first and the last stage meet on one rank.",
    ),
    slips=_SLIPS,
    sequences=(6, 4, 5, 7, 8, 9),
    length=(100, 60, 80, 120),
    half=lambda length, **_: length // 2,
    end=lambda half, **_: half - 1,
    last=lambda length, **_: length - 1,
    called={"half": "tokens of a document", "end": "positions", "last": ""},
)


packed = Repair(
    "two_tokens-3",
    "Documents that know each other",
    "Repair `rows(documents)`: ids, targets, next ids and second targets of packed documents.",
    judge=_judge_packed,
    minutes=12,
    points=2,
    hints=(
        "Which token follows the last token of a document? And which target does the token before have?",
        "Shift each document by itself, then put the rows together.",
    ),
)
