"""Typical wrong answers and lazy cheats of the exercises on column-parallel layers."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "held, forward_bytes, backward_bytes, gather_bytes = "

TYPICAL = {
    "column_parallel-1": {
        "no bias": Bad(_PREDICT + "24, 0, 288, 216", "the weight alone"),
        "sums y": Bad(_PREDICT + "27, 432, 288, 216", "a slice of y, not a summand"),
        "sums dy": Bad(_PREDICT + "27, 0, 432, 216", "that sums dy"),
        "own quarter": Bad(_PREDICT + "27, 0, 288, 288", "own quarter does not travel"),
    },
    "column_parallel-2": {
        "no f": Bad([("CopyToRanks.apply(x)", "x")], "2 rank(s), x [1, 2], weight [2, 2], bias [2]: rank 0: each rank"),
        "averages": Bad([("all_reduce(total)", 'all_reduce(total, "avg")')], "one over the number of ranks"),
        "f and g": Bad(
            [
                (
                    "return linear(CopyToRanks.apply(x), weight, bias)",
                    "y = linear(CopyToRanks.apply(x), weight, bias)"
                    "\n    total = y.detach().clone()\n    comm.all_reduce(total)\n    return y + (total - y).detach()",
                ),
            ],
            "y differs from one process",
        ),
        "sums the weights too": Bad(
            [("CopyToRanks.apply(x), weight, bias", "CopyToRanks.apply(x), CopyToRanks.apply(weight), bias")], "dweight"
        ),
        "in place": Bad(
            """
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        dx = grad @ weight
        comm.all_reduce(dx)
        rows = grad.flatten(0, -2)
        dw, db = rows.t() @ x.flatten(0, -2), rows.sum(0)
        grad.zero_()
        return dx, dw, db

def column_linear(x, weight, bias):
    return Product.apply(x, weight, bias)
""",
            "send a copy",
        ),
    },
    "column_parallel-3": {
        "too early": Bad([("copy_to_ranks(x * scale)", "copy_to_ranks(x) * scale")], "f stands too early"),
        "twice": Bad([("copy_to_ranks(x * scale)", "copy_to_ranks(copy_to_ranks(x) * scale)")], "dx is 2 times"),
        "each by itself": Bad(
            [("copy_to_ranks(x * scale)", "copy_to_ranks(x) * copy_to_ranks(scale)")], "One sum is enough"
        ),
        "the weight": Bad([("scale), weight)", "scale), copy_to_ranks(weight))")], "belong to nobody else"),
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
def column_linear(x, weight, bias):
    return linear(copy_to_ranks(x), weight, bias)
""",
            "the library's own is switched off",
        ),
        "nothing": Bad("def column_linear(x, weight, bias):\n    return None", "y is missing"),
    },
    "column_parallel-3": {
        "as it was": Bad(
            "def scaled_linear(x, scale, weight):\n    return linear(x * scale, weight)", "own summand of dx"
        ),
    },
}
