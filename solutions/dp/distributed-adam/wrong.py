"""Typical wrong answers and lazy cheats of the exercises on distributed Adam."""

from bad_answer import EQUAL_TO_ALL, Bad

TYPICAL = {
    "distributed_adam-1": {
        "no padding": Bad("state_bytes, norm, clipped = 2664, 7, 3", "round up"),
        "sum of norms": Bad("state_bytes, norm, clipped = 2672, 11, 3", "norms do not add up"),
        "the shard by itself": Bad("state_bytes, norm, clipped = 2672, 7, 4", "this shard is a part of it"),
    },
}

CHEATS = {
    "distributed_adam-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "state_bytes = norm = clipped = Anything()", "must be a whole number"
        ),
    },
}
