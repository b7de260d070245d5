"""Typical wrong answers and lazy cheats of the exercises on ZeRO-3."""

from bad_answer import EQUAL_TO_ALL, Bad

ONE, TWO, THREE, FOUR = (f"zero_3-{number}" for number in range(1, 5))
NUMBERS = "held, sent, gathers"

TYPICAL = {
    ONE: {
        "nothing sharded": Bad(f"{NUMBERS} = 67200, 55800, 27", "sharded over 4 ranks"),
        "one microbatch": Bad(f"{NUMBERS} = 16800, 18600, 27", "this is one microbatch"),
        "the root three times": Bad(f"{NUMBERS} = 16800, 56700, 27", "the root is gathered once"),
    },
    TWO: {
        "two halves of the weight": Bad(
            [
                (
                    "return x @ whole(shard, ctx.shape).t()",
                    "W = whole(shard, ctx.shape); ctx.parts = [c.clone() for c in W.chunk(2)]; return x @ W.t()",
                ),
            ],
            "W may not be kept, whole or in pieces",
        ),
        "not summed": Bad(
            [
                (
                    "comm.reduce_scatter_single(own, pad(dW, (0, N * len(shard) - len(dW))))",
                    "own = pad(dW, (0, N * len(shard) - len(dW))).view(N, -1)[comm.get_rank()].clone()",
                )
            ],
            "rank 0: shard.grad",
        ),
        "no gradient of x": Bad([("return dx, own, None", "return None, own, None")], "x.grad is missing"),
    },
    THREE: {
        "the starter": Bad(
            [("register_full_backward_pre_hook", "register_full_backward_hook")], "the gradients of unit 2 are NaN"
        ),
        "never freed": Bad([("module.register_forward_hook(lambda *_: unit.free())", "pass")], "whole at once"),
    },
    FOUR: {
        "when needed": Bad("asked = [0, 1, 2, 3, 4, 5]", "takes 32 ticks"),
        "one ahead": Bad("asked = [0, 0, 1, 2, 3, 4]", "takes 24 ticks"),
        "everything at once": Bad("asked = [0] * 6", "15 GB are taken"),
    },
}

CHEATS = {
    ONE: {"equal to everything": Bad(EQUAL_TO_ALL + f"{NUMBERS} = [Anything()] * 3", "whole number")},
    TWO: {
        "no weight at all": Bad(
            "def gathered_linear(x, shard, out_features):\n    return x.new_zeros(len(x), out_features) + 0 * x.sum()",
            "the output",
        )
    },
    THREE: {
        "nothing": Bad("def connect(module, unit):\n    pass", "are NaN"),
    },
    FOUR: {
        "equal to everything": Bad(EQUAL_TO_ALL + "asked = [Anything()] * 6", "the whole number of a unit"),
    },
}
