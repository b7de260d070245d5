"""Typical wrong answers and lazy cheats of the exercises on who sums what with whom."""

from bad_answer import EQUAL_TO_ALL, Bad

ONE = "sums-1"
NUMBERS = "attention, expert, router_copies, expert_groups = "

TYPICAL = {
    ONE: {
        "attention over dp alone": Bad(NUMBERS + "3, 3, 48, 16", "other sentences too"),
        "experts over all data ranks": Bad(NUMBERS + "12, 12, 48, 16", "mix gradients of different weights"),
        "no mirrors": Bad(NUMBERS + "12, 3, 24, 16", "two axes beside dp and ep"),
    },
}

CHEATS = {
    ONE: {"equal to everything": Bad(EQUAL_TO_ALL + NUMBERS + "[Anything()] * 4", "whole number")},
}
