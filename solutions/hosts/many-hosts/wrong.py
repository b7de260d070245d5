"""Typical wrong answers and lazy cheats of the exercises on a run on many hosts."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "rank, offset, bound, apart, seconds = "

TYPICAL = {
    "many_hosts-1": {
        "host by host from one": Bad(_PREDICT + "11, 4050, 150, 240, 50", "three whole hosts come before"),
        "at the beginning": Bad(_PREDICT + "14, 4200, 150, 240, 50", "half way is the best guess"),
        "the whole travel": Bad(_PREDICT + "14, 4050, 300, 240, 50", "at most half of it"),
    },
}

CHEATS = {
    "many_hosts-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "rank = offset = bound = apart = seconds = Anything()", "must be a whole number"
        ),
    },
}
