"""Typical wrong answers and lazy cheats of the exercises on a Llama block."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "whole_bytes, cut_bytes, collectives, kept_bytes = "
_DX = "dx = scatter(grad @ weight)"
_DW = "dw = grad.flatten(0, -2).T @ gather(x).flatten(0, -2)"
_SLICE = "dx = (grad @ weight).chunk(comm.get_world_size(), -2)[comm.get_rank()]"
_OWN = (
    "own = grad.chunk(comm.get_world_size(), -2)[comm.get_rank()]\n        dw = own.flatten(0, -2).T @ x.flatten(0, -2)"
)

TYPICAL = {
    "block-1": {
        "forward alone": Bad(_PREDICT + "117_440_512, 293_601_280, 10, 16_777_216", "one direction"),
        "the same": Bad(_PREDICT + "234_881_024, 234_881_024, 8, 16_777_216", "gathered once more"),
        "halves": Bad(_PREDICT + "234_881_024, 293_601_280, 8, 16_777_216", "what is gathered again"),
    },
    "block-2": {
        "nothing": Bad("def finish(grads, sequence_parallel):\n    pass", "still a partial sum"),
        "norms always": Bad(
            [("    if sequence_parallel:\n        endings", "    if True:\n        endings")], "was complete"
        ),
        "averaged": Bad([("comm.all_reduce(flat)", 'comm.all_reduce(flat, "avg")')], "or is a mean"),
    },
    "block-3": {
        "dx alone": Bad([(_DW, _OWN)], "dfirst"),
        "dW alone": Bad([(_DX, _SLICE)], "What the other ranks found out"),
        "keeps the whole input": Bad(
            [
                (
                    "ctx.save_for_backward(x, weight)\n        return linear(gather(x), weight)",
                    "ctx.whole = gather(x)\n        ctx.save_for_backward(x, weight)\n"
                    "        return linear(ctx.whole, weight)",
                ),
                (_DW, "gather(x)\n        dw = grad.flatten(0, -2).T @ ctx.whole.flatten(0, -2)"),
            ],
            "its own tokens of the input, not all",
        ),
    },
}

CHEATS = {
    "block-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "whole_bytes = cut_bytes = collectives = kept_bytes = Anything()", "must be a whole number"
        ),
    },
    "block-2": {
        "past the ledger": Bad(
            """
def finish(grads, sequence_parallel):
    import torch.distributed as dist
    endings = ("norm.weight",) if sequence_parallel else ("q_norm.weight", "k_norm.weight")
    for name, grad in grads.items():
        if name.endswith(endings):
            dist.all_reduce(grad)
""",
            "the ranks sent 0 bytes in all",
        ),
    },
    "block-3": {
        "the library's own": Bad(
            """
def pair(x, first, second):
    from dualpipe_lab.tp.mappings import gather_tokens, reduce_scatter_tokens
    return reduce_scatter_tokens(linear(torch.tanh(linear(gather_tokens(x), first)), second))
""",
            "the library's own is switched off",
        ),
    },
}
