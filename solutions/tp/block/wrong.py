"""Typical wrong answers and lazy cheats of the exercises on a Llama block."""

from bad_answer import Bad

_DX = "dx = scatter(grad @ weight)"
_DW = "dw = grad.flatten(0, -2).T @ gather(x).flatten(0, -2)"
_SLICE = "dx = (grad @ weight).chunk(comm.get_world_size(), -2)[comm.get_rank()]"
_OWN = (
    "own = grad.chunk(comm.get_world_size(), -2)[comm.get_rank()]\n        dw = own.flatten(0, -2).T @ x.flatten(0, -2)"
)

TYPICAL = {
    "block-4": {
        "the residual inside of the sum": Bad(
            [
                (
                    "x = x + SumFromRanks.apply(attention(own, w, heads, attend), ranks)",
                    "x = SumFromRanks.apply(x + attention(own, w, heads, attend), ranks)",
                )
            ],
            "and it is 2 times x: add the residual behind the sum",
        ),
        "whole gradients of norms": Bad(
            [
                (
                    'norm(x, w["norm1"]), ranks)\n        x',
                    'norm(x, CopyToRanks.apply(w["norm1"], ranks)), ranks)\n        x',
                )
            ],
            "dnorm1 is the same on all ranks, and should be this rank's partial sum",
        ),
        "heads as they lie": Bad(
            [(".unflatten(-1, (heads, -1)).transpose(0, 1)", ".reshape(heads, len(x), -1)")],
            "unflatten those, then swap the axes",
        ),
    },
    "block-3": {
        "dx alone": Bad([(_DW, _OWN)], "dfirst"),
        "dW alone": Bad([(_DX, _SLICE)], "What the other ranks found out"),
        "keeps the whole input": Bad(
            [
                (
                    "ctx.save_for_backward(x, weight)\n        return F.linear(gather(x), weight)",
                    "ctx.whole = gather(x)\n        ctx.save_for_backward(x, weight)\n"
                    "        return F.linear(ctx.whole, weight)",
                ),
                (_DW, "gather(x)\n        dw = grad.flatten(0, -2).T @ ctx.whole.flatten(0, -2)"),
            ],
            "its own tokens of the input, not all",
        ),
    },
}

CHEATS = {
    "block-4": {
        "torch's attention": Bad(
            [
                ("import silu", "import scaled_dot_product_attention, silu"),
                ("attend(q, k, v)", "scaled_dot_product_attention(q, k, v, is_causal=True)"),
            ],
            "scaled_dot_product_attention is off in block",
        ),
        "a later part": Bad(
            [("from mine.row import", "from mine.softmax import merge\nfrom mine.row import")],
            "mine.softmax is not before block",
        ),
    },
    "block-3": {
        "the library's own": Bad(
            """
def pair(x, first, second):
    from dualpipe_lab.tp import gather_tokens, reduce_scatter_tokens
    return reduce_scatter_tokens(F.linear(torch.tanh(F.linear(gather_tokens(x), first)), second))
""",
            "the library's own is switched off",
        ),
    },
}
