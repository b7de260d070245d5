"""Typical wrong answers and lazy cheats of the exercises on training."""

from bad_answer import EQUAL_TO_ALL, Bad

ONE = "training-1"
NUMBERS = "first, gigabytes, seconds, millionths = "

TYPICAL = {
    ONE: {
        "the beginning of the rank": Bad(NUMBERS + "72, 96, 600, 300", "the beginning of the rank"),
        "with gradients": Bad(NUMBERS + "84, 128, 600, 300", "gradients are not saved"),
        "the whole interval": Bad(NUMBERS + "84, 96, 1200, 300", "the middle of an interval"),
    },
}

CHEATS = {
    ONE: {"equal to everything": Bad(EQUAL_TO_ALL + NUMBERS + "[Anything()] * 4", "whole number")},
}
