"""Typical wrong answers and lazy cheats of the exercises on hybrid ZeRO."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "inside, to_others, flat_out, held"
PLAN = "stage, shard_ranks, num_microbatches"

TYPICAL = {
    "hybrid_zero-1": {
        "flat inside": Bad(f"{NAMES} = 13_500, 360, 13_500, 4", "the gathers stay in a node"),
        "the whole model across": Bad(f"{NAMES} = 10_800, 1_440, 13_500, 4", "each sums its shard"),
        "flat state": Bad(f"{NAMES} = 10_800, 360, 13_500, 1", "16 / 16 is flat ZeRO-3"),
    },
    "hybrid_zero-4": {
        "flat ZeRO-1": Bad(f'{PLAN} = "zero1", 32, 4', "sends for 620 ms"),
        "hybrid ZeRO-3": Bad(f'{PLAN} = "zero3", 8, 2', "sends for 270 ms"),
        "small microbatches": Bad(f'{PLAN} = "zero2", 8, 8', "sends for 375 ms"),
    },
}

CHEATS = {
    "hybrid_zero-1": {
        "equal to everything": Bad(EQUAL_TO_ALL + "inside = to_others = flat_out = held = Anything()", "whole number")
    },
    "hybrid_zero-4": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "stage = shard_ranks = num_microbatches = Anything()", "a stage is one"
        ),
    },
}
