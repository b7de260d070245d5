"""Typical wrong answers and lazy cheats of the exercises on who sums what with whom."""

from bad_answer import EQUAL_TO_ALL, Bad

ONE, TWO, THREE, FOUR = (f"sums-{number}" for number in range(1, 5))
NUMBERS = "attention, expert, router_copies, expert_groups = "

TYPICAL = {
    ONE: {
        "attention over dp alone": Bad(NUMBERS + "3, 3, 48, 16", "other sentences too"),
        "experts over all data ranks": Bad(NUMBERS + "12, 12, 48, 16", "mix gradients of different weights"),
        "no mirrors": Bad(NUMBERS + "12, 3, 24, 16", "two axes beside dp and ep"),
    },
    TWO: {
        "divides by the ranks of the sum": Bad(
            [("prod(sizes[axis] for axis in data_axes)", "prod(sizes[axis] for axis in axes)")],
            "divided by the ranks that summed it",
        ),
        "a sum of means": Bad(
            [("        flat /= prod(sizes[axis] for axis in data_axes)\n", "")], "sum of the ranks' means"
        ),
        "experts over all": Bad([(" if axis not in cut]", "]")], "also over those with other weights"),
    },
    THREE: {
        "the starter": Bad('plan = {"dp": 8}', "fewer bytes held"),
        "fully sharded": Bad('plan = {"ep": 4, "tp": 2, "zero": 3}', "fewer bytes sent"),
        "too many heads": Bad('plan = {"tp": 8}', "num_heads must divide"),
    },
    FOUR: {
        "the starter": Bad([("holders * prod", "prod")], "mirrored stages count twice"),
        "divides twice": Bad([("holders * prod", "holders**2 * prod")], "count half"),
        "squared": Bad([("float(square.sqrt())", "float(square)")], "squared norm"),
    },
}

CHEATS = {
    ONE: {"equal to everything": Bad(EQUAL_TO_ALL + NUMBERS + "[Anything()] * 4", "whole number")},
    TWO: {"does nothing": Bad("def reduce_gradients(parameters, said, mesh):\n    pass", "gradient 0")},
    THREE: {"no plan": Bad("plan = {}", "is a plan for 1 ranks")},
    FOUR: {"no message": Bad([("    comm.all_reduce(square)\n", "")], "the norm of the full model: it is 0.71")},
}
