"""Typical wrong answers and lazy cheats of the exercises on Easy-DualPipe."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "bubble, makespan, peak_of_rank_0, peak_of_rank_2"

TYPICAL = {
    "easy_dualpipe-1": {
        "as many as ranks": Bad(f"{NAMES} = 12, 32, 3, 4", "for m = p"),
        "1F1B": Bad(f"{NAMES} = 25, 45, 6, 4", "1F1B's"),
        "longer gaps": Bad(f"{NAMES} = 18, 38, 3, 4", "the shorter of F and B"),
    },
}

CHEATS = {
    "easy_dualpipe-1": {"equal to everything": Bad(EQUAL_TO_ALL + f"{NAMES} = [Anything()] * 4", "whole number")},
}
