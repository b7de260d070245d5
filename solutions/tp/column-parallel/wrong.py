"""Typical wrong answers and lazy cheats of the exercises on column-parallel layers."""

from bad_answer import Bad

TYPICAL = {
    "column_parallel-4": {
        "no f": Bad(
            [("return linear(CopyToRanks.apply(x, ranks), weight)", "return linear(x, weight)")],
            "it is what this rank's own outputs say",
        ),
        "a hook of the forward": Bad(
            [
                (
                    "ctx.save_for_backward(x, weight)",
                    'ctx.save_for_backward(x, weight)\n        ctx.hook = HOOKS["weight_grad"]',
                ),
                ('HOOKS["weight_grad"](weight, x, dy)', "ctx.hook(weight, x, dy)"),
            ],
            "is the hook read when the backward runs",
        ),
        "sums what came in": Bad([("dx = dy.clone()", "dx = dy")], "others may hold it still"),
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
    "column_parallel-4": {
        "autograd's backward": Bad(
            [
                (
                    "return dy @ weight, HOOKS",
                    "with torch.enable_grad():\n            x, weight = x.detach().requires_grad_(), weight\n"
                    "        return dy @ weight, HOOKS",
                )
            ],
            "torch.enable_grad is off in column",
        ),
        "autograd's product, the hook for show": Bad(
            [("return linear(CopyToRanks.apply(x, ranks), weight)", "return CopyToRanks.apply(x, ranks) @ weight.t()")],
            "meanwhile 0 times",
        ),
    },
    "column_parallel-3": {
        "as it was": Bad(
            "def scaled_linear(x, scale, weight):\n    return functional.linear(x * scale, weight)",
            "the ranks have partial sums",
        ),
    },
}
