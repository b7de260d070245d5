"""Typical wrong answers and lazy cheats of the exercises on PipeDream."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "used, newest_at_b, kept, used_synced, kept_synced, peak"

TYPICAL = {
    "pipedream-1": {
        "no delay": Bad(f"{NAMES} = 9, 9, 3, 6, 4, 2", "without a delay"),
        "stage 0's": Bad(f"{NAMES} = 6, 9, 3, 6, 4, 2", "one stage nearer to the loss"),
        "sync changes nothing": Bad(f"{NAMES} = 7, 9, 3, 7, 3, 2", "stage 0's version goes along"),
    },
}

CHEATS = {
    "pipedream-1": {"equal to everything": Bad(EQUAL_TO_ALL + f"{NAMES} = [Anything()] * 6", "whole number")},
}
