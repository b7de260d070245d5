"""Typical wrong answers and lazy cheats of the exercises on low-rank adapters."""

from bad_answer import EQUAL_TO_ALL, Bad

ONE, TWO = "lora-1", "lora-2"
NUMBERS = "zero_1, zero_3, gradients, gathered = "

TYPICAL = {
    ONE: {
        "nothing sharded": Bad(NUMBERS + "16_640, 4_160, 60, 24_120", "12 of the 16 bytes"),
        "ZeRO-2": Bad(NUMBERS + "16_220, 4_160, 60, 24_120", "that is ZeRO-2"),
        "gradients of frozen weights": Bad(NUMBERS + "32_280, 4_160, 60, 24_120", "have no gradient"),
    },
}

CHEATS = {
    ONE: {"equal to everything": Bad(EQUAL_TO_ALL + NUMBERS + "[Anything()] * 4", "whole number")},
}
