"""Typical wrong answers and lazy cheats of the exercises on column-parallel layers."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "held, forward_bytes, backward_bytes, gather_bytes = "

TYPICAL = {
    "column_parallel-1": {
        "no bias": Bad(_PREDICT + "24, 0, 288, 216", "the weight alone"),
        "sums y": Bad(_PREDICT + "27, 432, 288, 216", "a slice of y, not a partial sum"),
        "sums dy": Bad(_PREDICT + "27, 0, 432, 216", "that sums dy"),
    },
    "column_parallel-2": {
        "no f": Bad([("    x, z = CopyBoth.apply(x, z)\n", "")], "the ranks have partial sums"),
        "averages": Bad([("all_reduce(flat)", 'all_reduce(flat, "avg")')], "one over the number of ranks"),
        "f for one of the two": Bad(
            [("x, z = CopyBoth.apply(x, z)", "x, _ = CopyBoth.apply(x, z)")], "rank 0: dz differs from one process"
        ),
    },
    "column_parallel-3": {
        "too early": Bad([("copy_to_ranks(x * scale)", "copy_to_ranks(x) * scale")], "f stands too early"),
        "each by itself": Bad(
            [("copy_to_ranks(x * scale)", "copy_to_ranks(x) * copy_to_ranks(scale)")], "One sum is enough"
        ),
        "the weight": Bad([("scale), weight)", "scale), copy_to_ranks(weight))")], "belong to this rank alone"),
    },
}

CHEATS = {
    "column_parallel-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "held = forward_bytes = backward_bytes = gather_bytes = Anything()", "must be a whole number"
        ),
    },
    "column_parallel-2": {
        "the library's own": Bad(
            """
def column_linear(x, z, weight, other, bias):
    return linear(copy_to_ranks(x), weight, bias) + linear(copy_to_ranks(z), other)
""",
            "the library's own is switched off",
        ),
    },
    "column_parallel-3": {
        "as it was": Bad(
            "def scaled_linear(x, scale, weight):\n    return linear(x * scale, weight)", "the ranks have partial sums"
        ),
    },
}
