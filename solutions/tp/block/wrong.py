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
        "other tensors": Bad(
            [
                ("    partial = [grad for name, grad in grads.items()", "    partial = [name for name in grads"),
                ("grad.flatten() for grad in partial]", "grads[name].flatten() for name in partial]"),
                ("[grad.numel() for grad in partial]", "[grads[name].numel() for name in partial]"),
                ("    for grad, total in", "    for name, total in"),
                ("grad.copy_(total.view_as(grad))", "grads[name] = total.view_as(grads[name])"),
            ],
            "is the tensor that it was, and grads has another",
        ),
        "nothing": Bad("def finish(grads, sequence_parallel):\n    pass", "still a partial sum"),
        "norms always": Bad(
            [("    if sequence_parallel:\n        endings", "    if True:\n        endings")], "was complete"
        ),
    },
    "block-3": {
        "as it was": Bad([(_DX, _SLICE), (_DW, _OWN)], "dx differs from one process"),
        "dx alone": Bad([(_DW, _OWN)], "dfirst"),
        "dW alone": Bad([(_DX, _SLICE)], "What the other ranks found out"),
    },
}

CHEATS = {
    "block-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "whole_bytes = cut_bytes = collectives = kept_bytes = Anything()", "must be a whole number"
        ),
    },
    "block-2": {
        "the library's own": Bad(
            """
def finish(grads, sequence_parallel):
    from types import SimpleNamespace as Name
    from dualpipe_lab.tp.grads import sum_partial_gradients
    class Fake(torch.nn.Module):
        pass
    sum_partial_gradients(Fake())
""",
            "the library's own is switched off",
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
