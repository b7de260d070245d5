"""Typical wrong answers and lazy cheats of the exercises on column-parallel layers."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "held, forward_bytes, backward_bytes, gather_bytes = "

TYPICAL = {
    "column_parallel-1": {
        "no bias": Bad(_PREDICT + "24, 0, 288, 216", "the weight alone"),
        "sums y": Bad(_PREDICT + "27, 432, 288, 216", "a slice of y, not a partial sum"),
        "sums dy": Bad(_PREDICT + "27, 0, 432, 216", "that sums dy"),
        "own quarter": Bad(_PREDICT + "27, 0, 288, 288", "own quarter does not travel"),
    },
    "column_parallel-2": {
        "in float32": Bad(
            [
                (
                    "return linear(x, weight, bias) + linear(z, other)",
                    "return (linear(x, weight, bias) + linear(z, other)).float()",
                )
            ],
            "a result is torch.float32",
        ),
        "no f": Bad([("    x, z = CopyBoth.apply(x, z)\n", "")], "the ranks have partial sums"),
        "averages": Bad([("all_reduce(flat)", 'all_reduce(flat, "avg")')], "one over the number of ranks"),
        "f for one of the two": Bad(
            [("x, z = CopyBoth.apply(x, z)", "x, _ = CopyBoth.apply(x, z)")], "rank 0: dz differs from one process"
        ),
        "f and g": Bad(
            [
                (
                    "return linear(x, weight, bias) + linear(z, other)",
                    "y = linear(x, weight, bias) + linear(z, other)"
                    "\n    total = y.detach().clone()\n    comm.all_reduce(total)\n    return y + (total - y).detach()",
                ),
            ],
            "y differs from one process",
        ),
        "f of the chapter, twice": Bad(
            """
class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(total)
        return total

def column_linear(x, z, weight, other, bias):
    return linear(CopyToRanks.apply(x), weight, bias) + linear(CopyToRanks.apply(z), other)
""",
            "a rank sent 2 messages in the backward; one carries dx and dz",
        ),
        "sums the weights too": Bad(
            [("    return linear(x", "    weight, other = CopyBoth.apply(weight, other)\n    return linear(x")],
            "dweight",
        ),
        "exchanged": Bad([("flat.split([dx.numel(), dz.numel()])", "flat.split([dz.numel(), dx.numel()])")], "raised"),
        "in place": Bad(
            """
class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, z, weight, other, bias):
        ctx.save_for_backward(x, z, weight, other)
        return linear(x, weight, bias) + linear(z, other)

    @staticmethod
    def backward(ctx, grad):
        x, z, weight, other = ctx.saved_tensors
        flat = torch.cat([(grad @ weight).flatten(), (grad @ other).flatten()])
        comm.all_reduce(flat)
        rows = grad.flatten(0, -2)
        found = rows.t() @ x.flatten(0, -2), rows.t() @ z.flatten(0, -2), rows.sum(0)
        grad.zero_()
        return flat[: x.numel()].view_as(x), flat[x.numel() :].view_as(z), *found

def column_linear(*tensors):
    return Both.apply(*tensors)
""",
            "send a copy",
        ),
    },
    "column_parallel-3": {
        "behind the product": Bad(
            [("linear(copy_to_ranks(x * scale), weight)", "copy_to_ranks(linear(x * scale, weight))")],
            "rank 0: dx: f stands behind the product",
        ),
        "too early": Bad([("copy_to_ranks(x * scale)", "copy_to_ranks(x) * scale")], "f stands too early"),
        "twice": Bad([("copy_to_ranks(x * scale)", "copy_to_ranks(copy_to_ranks(x) * scale)")], "dx is 2 times"),
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
        "nothing": Bad("def column_linear(x, z, weight, other, bias):\n    return None", "y is missing"),
    },
    "column_parallel-3": {
        "as it was": Bad(
            "def scaled_linear(x, scale, weight):\n    return linear(x * scale, weight)", "the ranks have partial sums"
        ),
    },
}
