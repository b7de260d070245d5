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
        "rounded down": Bad([("-(-len(flat) // N)", "len(flat) // N")], "5 numbers on 2 rank(s)"),
        "root of a sum of norms": Bad([(".square().sum()", ".norm()")], "add squares, not norms"),
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
        "equal to everything": Bad(EQUAL_TO_ALL + "owners = [Anything()] * 9", "whole number from 0 to 3"),
    },
}
