"""Typical wrong answers and lazy cheats of the exercises on a run on many hosts."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "rank, offset, bound, apart, seconds = "
_BEST = "min(answers, key=lambda answer: answer[2] - answer[0])"
_LINE = "    offset += (other_offset - offset) * (time - begin) / (end - begin)\n"

TYPICAL = {
    "many_hosts-1": {
        "host by host from one": Bad(_PREDICT + "11, 4050, 150, 240, 50", "three whole hosts come before"),
        "at the beginning": Bad(_PREDICT + "14, 4200, 150, 240, 50", "half way is the best guess"),
        "the whole travel": Bad(_PREDICT + "14, 4050, 300, 240, 50", "at most half of it"),
    },
    "many_hosts-2": {
        "the last answer": Bad([(_BEST, "answers[-1]")], "the quickest one has the smallest bound"),
        "the time of asking": Bad([("s - (t0 + t1) / 2", "s - t0")], "take the middle"),
        "no drift": Bad([(_LINE, "")], "this is the first offset alone"),
    },
}

CHEATS = {
    "many_hosts-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "rank = offset = bound = apart = seconds = Anything()", "must be a whole number"
        ),
    },
    "many_hosts-2": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "def read_clock(answers):\n    return Anything(), Anything()\n\non_their_clock = read_clock",
            "which is no data",
        ),
    },
}
