"""Typical wrong answers and lazy cheats of the exercises on sequence parallelism."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "forward_bytes, backward_bytes, kept_bytes, kept_whole = "
_SCATTER = "return scatter(grad, ctx.num_tokens), None"

TYPICAL = {
    "sequence_parallelism-1": {
        "one half": Bad(_PREDICT + "786_432, 2_359_296, 524_288, 1_310_720", "one half"),
        "gathered once": Bad(_PREDICT + "1_572_864, 1_572_864, 524_288, 1_310_720", "without the second gather"),
        "all tokens": Bad(_PREDICT + "1_572_864, 2_359_296, 2_097_152, 1_310_720", "if it has all tokens"),
    },
    "sequence_parallelism-2": {
        "a slice of one partial sum": Bad(
            [
                (
                    _SCATTER,
                    "size = -(-ctx.num_tokens // comm.get_world_size())\n"
                    "        start = comm.get_rank() * size\n"
                    "        return grad[start : start + size].clone(), None",
                )
            ],
            "dx",
        ),
        "the padding stays": Bad([("return full[:num_tokens]", "return full")], "rank"),
        "all-reduced": Bad(
            [
                (
                    "comm.reduce_scatter_single(own, pad(x, (0, 0, 0, size * t - num_tokens)).contiguous())",
                    "total = pad(x, (0, 0, 0, size * t - num_tokens)).clone()\n"
                    "    comm.all_reduce(total)\n"
                    "    own = total[rank * size : (rank + 1) * size]",
                )
            ],
            "in the forward the ranks sent",
        ),
    },
    "sequence_parallelism-3": {
        "in the partial sum": Bad(
            [("linear(wide, second)) + copy_to_ranks(bias)", "linear(wide, second, bias))")],
            "The bias belongs to every token once",
        ),
        "divided": Bad(
            [
                (
                    "linear(wide, second)) + copy_to_ranks(bias)",
                    "linear(wide, second, bias / comm.get_world_size()))",
                )
            ],
            "dbias",
        ),
        "forgotten": Bad([("+ copy_to_ranks(bias)", "+ 0 * copy_to_ranks(bias)")], "The bias belongs to every token"),
    },
}

CHEATS = {
    "sequence_parallelism-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "forward_bytes = backward_bytes = kept_bytes = kept_whole = Anything()",
            "must be a whole number",
        ),
    },
    "sequence_parallelism-2": {
        "the library's own": Bad(
            """
def pair(x, first, second, num_tokens):
    return reduce_scatter_tokens(linear(torch.tanh(linear(gather_tokens(x), first)), second))
""",
            "the library's own is switched off",
        ),
    },
    "sequence_parallelism-3": {
        "as it was": Bad(
            [("+ copy_to_ranks(bias)", "+ bias")],
            "the ranks have partial sums",
        ),
    },
}
