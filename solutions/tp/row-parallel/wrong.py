"""Typical wrong answers and lazy cheats of the exercises on row-parallel layers."""

from bad_answer import Bad

TYPICAL = {
    "row_parallel-4": {
        "sums back too": Bad(
            [
                ("return dy, None", "dy = dy.clone()\n        all_reduce(dy, ctx.ranks)\n        return dy, None"),
                ("total = x.clone()", "ctx.ranks, total = ranks, x.clone()"),
            ],
            "its gradient passes as it is",
        ),
        "sums in place": Bad([("total = x.clone()", "total = x")], "sum a copy"),
        "no sum": Bad(
            [("SumFromRanks.apply(linear(x, weight), ranks)", "linear(x, weight)")], "this rank's partial sum"
        ),
    },
    "row_parallel-3": {
        "divided": Bad(
            [
                ("def project", "from dualpipe_lab import comm\n\ndef project"),
                ("functional.linear(x, weight)) + bias", "functional.linear(x, weight, bias / comm.get_world_size()))"),
            ],
            "must learn on every rank",
        ),
        "forgotten": Bad(
            [("functional.linear(x, weight)) + bias", "functional.linear(x, weight)) + 0 * bias")],
            "a multiple of the bias",
        ),
    },
}

CHEATS = {
    "row_parallel-4": {
        "autograd's product": Bad(
            [("apply(linear(x, weight), ranks)", "apply(x @ weight.t(), ranks)")],
            "The product is to be column's linear",
        ),
        "torch's sum": Bad(
            "from torch.distributed.nn.functional import all_reduce\n\n\n"
            "def row_linear(x, weight, ranks):\n    return all_reduce(x @ weight.t())",
            "torch.distributed is off in every part",
        ),
    },
    "row_parallel-3": {
        "as it was": Bad(
            "def project(x, weight, bias):\n    return reduce_from_ranks(functional.linear(x, weight, bias))",
            "a multiple of the bias",
        ),
    },
}
