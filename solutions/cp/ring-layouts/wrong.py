"""Typical wrong answers and lazy cheats of the exercises on layouts for context parallelism."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "visible, contiguous, striped, zigzag, hops = "

TYPICAL = {
    "ring_layouts-1": {
        "no window": Bad(_PREDICT + "136, 58, 40, 34, 3", "without the window"),
        "own block alone": Bad(_PREDICT + "58, 10, 16, 21, 1", "the second step is not empty"),
        "one rank's total": Bad(_PREDICT + "58, 16, 16, 16, 1", "no single rank"),
    },
    "ring_layouts-3": {
        "stripes": Bad("owner = [p % 4 for p in range(24)]", "= 254 pairs"),
        "zigzag": Bad("owner = [min(p // 3, 7 - p // 3) for p in range(24)]", "= 315 pairs"),
        "there and back": Bad("owner = [min(p % 8, 7 - p % 8) for p in range(24)]", "= 270 pairs"),
    },
}

CHEATS = {
    "ring_layouts-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "visible = contiguous = striped = zigzag = hops = Anything()", "must be a whole number"
        ),
    },
    "ring_layouts-3": {
        "all on one rank": Bad("owner = [0] * 24", "rank 0 holds 24 positions"),
    },
}
