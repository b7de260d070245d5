"""Typical wrong answers and lazy cheats of the exercises on the asynchronous all-to-all."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "in_turn, forward, backward, saved = "

TYPICAL = {
    "async_all_to_all-1": {
        "one exchange": Bad(_PREDICT + "25, 29, 38, 20", "one there and one back"),
        "the job's time": Bad(_PREDICT + "37, 25, 38, 20", "the exchange is longer"),
        "the exchange's time": Bad(_PREDICT + "37, 29, 34, 20", "the job is the longer one"),
    },
}

CHEATS = {
    "async_all_to_all-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "in_turn = forward = backward = saved = Anything()", "must be a whole number"
        ),
    },
}
