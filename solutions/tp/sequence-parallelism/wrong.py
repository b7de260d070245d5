"""Typical wrong answers and lazy cheats of the exercises on sequence parallelism."""

from bad_answer import Bad

_SUMMED = "return reduce_scatter(dy, ctx.ranks), None"
_BY_ALL_REDUCE = """
def reduce_scatter(x, ranks):
    total = x.contiguous().clone()
    all_reduce(total, ranks)
    return total.chunk(len(ranks))[ranks.index(get_rank())].clone()


"""

TYPICAL = {
    "sequence_parallelism-4": {
        "its own part of dy": Bad(
            [
                (
                    "import torch\nfrom torch import Tensor",
                    "import torch\nfrom dualpipe_lab.comm import get_rank\nfrom torch import Tensor",
                ),
                (_SUMMED, "return dy.chunk(len(ctx.ranks))[ctx.ranks.index(get_rank())].clone(), None"),
            ],
            "all ranks have used them, and the gradients of all add up",
        ),
        "an all-reduce, then a slice": Bad(
            [
                ("from typing import Any\n", "from typing import Any\nfrom dualpipe_lab.comm import get_rank\n"),
                ("import all_gather, reduce_scatter", "import all_gather, all_reduce"),
                ("class GatherTokens", _BY_ALL_REDUCE + "class GatherTokens"),
            ],
            "let a sum leave each rank its own tokens alone",
        ),
        "products of its own": Bad(
            [("linear(hidden, down)", "hidden @ down.t()")], "the gradient of down does not come through HOOKS"
        ),
    },
    "sequence_parallelism-3": {
        "in the partial sum": Bad(
            [("F.linear(wide, second)) + copy_to_ranks(bias)", "F.linear(wide, second, bias))")],
            "The bias belongs to every token once",
        ),
        "divided": Bad(
            [
                (
                    "F.linear(wide, second)) + copy_to_ranks(bias)",
                    "F.linear(wide, second, bias / comm.get_world_size()))",
                )
            ],
            "dbias",
        ),
        "forgotten": Bad([("+ copy_to_ranks(bias)", "+ 0 * copy_to_ranks(bias)")], "The bias belongs to every token"),
    },
}

CHEATS = {
    "sequence_parallelism-4": {
        "the library's own": Bad(
            [("from mine.ring import all_gather, reduce_scatter", "from dualpipe_lab.tp import gather_tokens")],
            "is the library's",
        ),
        "autograd in the backward": Bad(
            [
                (
                    _SUMMED,
                    "with torch.enable_grad():\n            return reduce_scatter(dy, ctx.ranks), None",
                )
            ],
            "torch.enable_grad is off",
        ),
    },
    "sequence_parallelism-3": {
        "as it was": Bad(
            [("+ copy_to_ranks(bias)", "+ bias")],
            "the ranks have partial sums",
        ),
    },
}
