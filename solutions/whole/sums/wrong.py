"""Typical wrong answers and lazy cheats of the exercises on who sums what with whom."""

from bad_answer import EQUAL_TO_ALL, Bad

ONE, TWO, THREE, FOUR = (f"sums-{number}" for number in range(1, 5))
NUMBERS = "attention, expert, router_copies, expert_groups = "

TYPICAL = {
    ONE: {
        "attention over dp alone": Bad(NUMBERS + "3, 3, 48, 16", "other sentences too"),
        "experts over all data ranks": Bad(NUMBERS + "12, 12, 48, 16", "mix gradients of different weights"),
        "no mirrors": Bad(NUMBERS + "12, 3, 24, 16", "two axes beside dp and ep"),
        "groups of the router": Bad(NUMBERS + "12, 3, 48, 4", "the router's sum"),
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
        "forgets partial gradients": Bad([('            axes.append("tp")', "            pass")], "are not added"),
        "along tp always": Bad([("if is_partial and", "if")], "full gradient already"),
        "leaves None": Bad(
            [("            parameter.grad = torch.zeros_like(parameter)", "            continue")], "same shape"
        ),
        "one call for each parameter": Bad(
            [
                ("setdefault(tuple(axes), [])", "setdefault((tuple(axes), parameter), [])"),
                ("for axes, gradients in", "for (axes, _), gradients in"),
            ],
            "one call each is enough",
        ),
    },
    THREE: {
        "the starter": Bad('plan = {"dp": 8}', "fewer bytes held"),
        "fully sharded": Bad('plan = {"ep": 4, "tp": 2, "zero": 3}', "fewer bytes sent"),
        "no ZeRO": Bad('plan = {"ep": 4, "tp": 2}', "fewer bytes held"),
        "too many heads": Bad('plan = {"tp": 8}', "num_heads must divide"),
        "a pipeline": Bad('plan = {"pp": 4, "ep": 2, "num_microbatches": 4}', "without a pipeline"),
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
