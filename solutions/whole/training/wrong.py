"""Typical wrong answers and lazy cheats of the exercises on training."""

from bad_answer import EQUAL_TO_ALL, Bad

ONE, TWO = "training-1", "training-2"
NUMBERS = "first, gigabytes, seconds, millionths = "
DRAW = 'random.Random(f"{seed}/{step}/{number}").random()'

TYPICAL = {
    ONE: {
        "the beginning of the rank": Bad(NUMBERS + "72, 96, 600, 300", "the beginning of the rank"),
        "with gradients": Bad(NUMBERS + "84, 128, 600, 300", "gradients are not saved"),
        "the whole interval": Bad(NUMBERS + "84, 96, 1200, 300", "the middle of an interval"),
    },
    TWO: {
        "all ranks alike": Bad([("data_rank * num_microbatches\n", "0\n")], "every rank reads the same"),
        "a sum as the seed": Bad(
            [(DRAW, "random.Random(seed + step + number).random()")], "is the same number for many"
        ),
        "cut down": Bad([("    if rest:\n", "    if False:\n")], "did not raise ValueError"),
    },
}

CHEATS = {
    ONE: {"equal to everything": Bad(EQUAL_TO_ALL + NUMBERS + "[Anything()] * 4", "whole number")},
    TWO: {
        "no seed at all": Bad([(DRAW, "random.random()")], "the plan changed them"),
    },
}
