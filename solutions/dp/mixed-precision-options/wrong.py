"""Typical wrong answers and lazy cheats of the exercises on the options of mixed precision."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "one_by_one, in_pairs, moves, steps, num_bytes = "

TYPICAL = {
    "mixed_precision_options-1": {
        "as with ones": Bad(_PREDICT + "256, 512, 64, 64, 7", "halves are lost earlier"),
        "exact": Bad(_PREDICT + "1_000, 512, 64, 64, 7", "a half is a tie"),
        "pairs stand still": Bad(_PREDICT + "128, 128, 64, 64, 7", "doubling is exact"),
    },
    "mixed_precision_options-3": {
        "own noise per rank": Bad([("+ part", "+ part + dp_rank")], "hold copies of one weight"),
        "norms cut": Bad([("tp_rank if is_cut else 0", "tp_rank")], "is not cut"),
        "never the largest": Bad([("randint(2**16,", "randint(2**16 - 1,")], "the largest 65,534"),
    },
}

CHEATS = {
    "mixed_precision_options-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "one_by_one = in_pairs = moves = steps = num_bytes = Anything()", "must be a whole number"
        ),
    },
    "mixed_precision_options-3": {
        "no noise": Bad(
            "def noise(size, seed, step, index, dp_rank, tp_rank, is_cut):\n"
            "    return torch.full((size,), 2**15, dtype=torch.int32)",
            "need their own",
        ),
    },
}
