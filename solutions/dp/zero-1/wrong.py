"""Typical wrong answers and lazy cheats of the exercises on ZeRO-1."""

from bad_answer import EQUAL_TO_ALL, Bad

ONE, TWO, THREE, FOUR = (f"zero_1-{number}" for number in range(1, 5))
NUMBERS = "shard, held, sent"

TYPICAL = {
    ONE: {
        "rounded down": Bad(f"{NUMBERS} = 333, 8016, 2672", "one parameter belongs to no rank"),
        "a third": Bad(f"{NUMBERS} = 1000 / 3, 8000, 2667", "padded until 3 divides it"),
        "no padding": Bad(f"{NUMBERS} = 334, 8000, 2672", "two of them padding"),
    },
    THREE: {
        "squared in place": Bad([("+ size].square().sum()", "+ size].square_().sum()")], "the optimizer reads it next"),
        "the starter's clamp at the end": Bad(
            [("start = rank * size", "start = min(rank * size, max(len(flat) - size, 0))")], "5 numbers on 2 rank(s)"
        ),
        "sum of norms": Bad(
            [
                (
                    "square = flat[start : start + size].square().sum()",
                    "square = flat[start : start + size].norm() ** 1",
                ),
                ("float(square.sqrt())", "float(square)"),
            ],
            "4 numbers on 2 rank(s): rank 0 added the norms",
        ),
    },
    FOUR: {
        "the greedy way": Bad("owners = [0, 1, 2, 3, 2, 3, 0, 1, 0]", "the heaviest 15"),
        "in turn": Bad("owners = [0, 1, 2, 3, 0, 1, 2, 3, 0]", "the heaviest 16"),
        "a fifth rank": Bad("owners = [0, 1, 2, 2, 0, 1, 3, 3, 4]", "from 0 to 3"),
    },
}

CHEATS = {
    ONE: {"equal to everything": Bad(EQUAL_TO_ALL + f"{NUMBERS} = [Anything()] * 3", "whole number")},
    THREE: {
        "the whole buffer": Bad("def norm_of_shards(flat):\n    return float(flat.norm())", "4 numbers on 2 rank(s)"),
    },
    FOUR: {
        "one parameter": Bad("owners = [0]", "a list of 9 ranks"),
    },
}
