"""Typical wrong answers and lazy cheats of the exercises on ZeRO-2."""

from bad_answer import EQUAL_TO_ALL, Bad

NUMBERS = "held, sent, peak"

TYPICAL = {
    "zero_2-1": {
        "ZeRO-1's bytes": Bad(f"{NUMBERS} = 16800, 25200, 2800", "this is ZeRO-1"),
        "one microbatch": Bad(f"{NUMBERS} = 13200, 7200, 2800", "each of the 6"),
        "weights in every microbatch": Bad(f"{NUMBERS} = 13200, 43200, 2800", "weights are gathered once"),
    },
}

CHEATS = {
    "zero_2-1": {"equal to everything": Bad(EQUAL_TO_ALL + f"{NUMBERS} = [Anything()] * 3", "whole number")},
}
