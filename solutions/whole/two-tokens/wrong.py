"""Typical wrong answers and lazy cheats of the exercises on two tokens at once."""

from bad_answer import EQUAL_TO_ALL, Bad

ONE, THREE = "two_tokens-1", "two_tokens-3"
NUMBERS = "second, documents, holders, messages = "

TYPICAL = {
    ONE: {
        "every position": Bad(NUMBERS + "600, 582, 8, 0", "has no second target"),
        "masks do not move": Bad(NUMBERS + "594, 594, 8, 0", "of the position before"),
        "an all-reduce": Bad(NUMBERS + "594, 582, 8, 2", "without a message"),
    },
    THREE: {
        "a target at the end": Bad([("goal[1:] + [-100]", "goal[1:] + [document[0]]")], "second targets, position"),
        "the next document's first token": Bad(
            [("next_ids += document[1:] + [0]", "next_ids += document[1:] + [1]")], "next ids, position"
        ),
        "two tokens at least": Bad([("goal[1:] + [-100]", "document[2:] + [-100, -100]")], "needs"),
    },
}

CHEATS = {
    ONE: {"equal to everything": Bad(EQUAL_TO_ALL + NUMBERS + "[Anything()] * 4", "whole number")},
    THREE: {
        "no targets": Bad(
            """
def rows(documents):
    ids = sum(documents, [])
    none = [-100] * len(ids)
    return ids, none, ids, none
""",
            "targets, position",
        )
    },
}
