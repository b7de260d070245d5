"""Typical wrong answers and lazy cheats of the exercises on DualPipe's overlap."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "serial, forward_first, backward_first, split_alone"

TYPICAL = {
    "dualpipe_overlap-1": {
        "work alone": Bad(f"{NAMES} = 54, 66, 68, 42", "each of the six all-reduces"),
        "the last travel only": Bad(f"{NAMES} = 102, 62, 68, 42", "shorter than the 8 ms"),
        "no order on the link": Bad(f"{NAMES} = 102, 66, 66, 42", "while the backward's is under way"),
    },
}

CHEATS = {
    "dualpipe_overlap-1": {"equal to everything": Bad(EQUAL_TO_ALL + f"{NAMES} = [Anything()] * 4", "whole number")},
}
