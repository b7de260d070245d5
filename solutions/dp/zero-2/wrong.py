"""Typical wrong answers and lazy cheats of the exercises on ZeRO-2."""

from bad_answer import EQUAL_TO_ALL, Bad

ONE, THREE = "zero_2-1", "zero_2-3"
NUMBERS = "held, sent, peak"

TYPICAL = {
    ONE: {
        "ZeRO-1's bytes": Bad(f"{NUMBERS} = 16800, 25200, 2800", "this is ZeRO-1"),
        "one microbatch": Bad(f"{NUMBERS} = 13200, 7200, 2800", "each of the 6"),
        "weights in every microbatch": Bad(f"{NUMBERS} = 13200, 43200, 2800", "weights are gathered once"),
    },
    THREE: {
        "the starter": Bad([("    p.grad = None\n", "")], "count several times"),
        "overwrites": Bad([("shard += own", "shard.copy_(own)")], "the last microbatch alone"),
        "zeroes it in place": Bad([("p.grad = None", "whole = whole.clone(); p.grad.zero_()")], "holds"),
    },
}

CHEATS = {
    ONE: {"equal to everything": Bad(EQUAL_TO_ALL + f"{NUMBERS} = [Anything()] * 3", "whole number")},
    THREE: {
        "nothing": Bad("def scatter(p, shard):\n    p.grad = None", "it is zero"),
    },
}
