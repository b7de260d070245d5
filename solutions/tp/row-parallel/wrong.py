"""Typical wrong answers and lazy cheats of the exercises on row-parallel layers."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "held, forward_bytes, backward_bytes, times = "

TYPICAL = {
    "row_parallel-1": {
        "no bias": Bad(_PREDICT + "96, 288, 288, 4", "the two weights"),
        "cuts both biases": Bad(_PREDICT + "104, 288, 288, 4", "every rank has it"),
        "nothing back": Bad(_PREDICT + "110, 288, 0, 4", "read by all ranks"),
    },
    "row_parallel-2": {
        "no sum": Bad([("ReduceFromRanks.apply(linear", "(linear")], "the ranks have partial sums"),
        "sums back too": Bad(
            [
                (
                    "        return grad\n",
                    "        grad = grad.clone()\n        comm.all_reduce(grad)\n        return grad\n",
                )
            ],
            "times that of one process, the number of ranks",
        ),
        "at the front": Bad([("(first, behind)", "(0, first + behind)")], "rank 0: y differs"),
    },
    "row_parallel-3": {
        "divided": Bad(
            [("linear(x, weight)) + bias", "linear(x, weight, bias / comm.get_world_size()))")],
            "must learn on every rank",
        ),
        "forgotten": Bad([("linear(x, weight)) + bias", "linear(x, weight)) + 0 * bias")], "a multiple of the bias"),
    },
}

CHEATS = {
    "row_parallel-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "held = forward_bytes = backward_bytes = times = Anything()", "must be a whole number"
        ),
    },
    "row_parallel-2": {
        "the library's own": Bad(
            "def row_linear(x, weight, bias, first):\n"
            "    return reduce_from_ranks(linear(x, weight) + pad(bias, (first, len(weight) - first - len(bias))))",
            "the library's own is switched off",
        ),
    },
    "row_parallel-3": {
        "as it was": Bad(
            "def project(x, weight, bias):\n    return reduce_from_ranks(linear(x, weight, bias))",
            "a multiple of the bias",
        ),
    },
}
