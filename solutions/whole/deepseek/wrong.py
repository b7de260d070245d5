"""Typical wrong answers and lazy cheats of the exercises on a tiny DeepSeek-V3."""

from bad_answer import EQUAL_TO_ALL, Bad

ONE = "deepseek-1"
NUMBERS = "copies, labels, all_to_alls, milliseconds = "

TYPICAL = {
    ONE: {
        "one rank per stage": Bad(NUMBERS + "2, 10, 120, 49", "DualPipe holds every stage on two ranks"),
        "all labels": Bad(NUMBERS + "4, 20, 120, 49", "half of the microbatches"),
        "every layer for every microbatch": Bad(NUMBERS + "4, 10, 240, 49", "the other 10 pass the copy"),
    },
}

CHEATS = {
    ONE: {"equal to everything": Bad(EQUAL_TO_ALL + NUMBERS + "[Anything()] * 4", "whole number")},
}
