"""Typical wrong answers and lazy cheats of the exercises on V-shapes."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "zbv_held, zbv_idle, v_min_held, v_min_idle, one_more"
LIBRARY = "rows = list(lab.schedules.{}(3, 3).rows())"

TYPICAL = {
    "v_shapes-1": {
        "full size": Bad(f"{NAMES} = 10, 9, 8, 35, 18", "two half-size ones"),
        "zero bubble": Bad(f"{NAMES} = 20, 0, 8, 35, 18", "local bubble"),
        "rounded late": Bad(f"{NAMES} = 20, 9, 9, 35, 18", "rounded down before"),
    },
    "v_shapes-2": {
        "ZBV": Bad(LIBRARY.format("zbv"), "20 ticks, but rank 0 holds 6"),
        "V-Half": Bad(LIBRARY.format("v_half"), "valid, 23 ticks with 4"),
        "a loop": Bad(
            'rows = ["0F0 3F0 3B0 0B0 0F1 3F1 3B1 0B1 0F2 3F2 3B2 0B2", '
            '"1F0 4F0 4B0 1B0 1F1 4F1 4B1 1B1 1F2 4F2 4B2 1B2", '
            '"2F0 5F0 5B0 2B0 2F1 5F1 5B1 2B1 2F2 5F2 5B2 2B2"]',
            "rank 0 works on stages [0, 3]",
        ),
    },
}

CHEATS = {
    "v_shapes-1": {"equal to everything": Bad(EQUAL_TO_ALL + f"{NAMES} = [Anything()] * 5", "whole number")},
    "v_shapes-2": {
        "empty": Bad("rows = []", "0 rows"),
    },
}
