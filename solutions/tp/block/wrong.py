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
        "all tokens": Bad(_PREDICT + "234_881_024, 293_601_280, 10, 134_217_728", "if it has all tokens"),
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
        "norms of heads never": Bad(
            [('endings = ("q_norm.weight", "k_norm.weight")', 'endings = ("nothing",)')], "q_norm.weight is still"
        ),
        "not the last norm": Bad(
            [('("norm.weight",)', '("n_norm.weight", "p_norm.weight", "q_norm.weight",)')], "still"
        ),
        "averaged": Bad([("comm.all_reduce(flat)", 'comm.all_reduce(flat, "avg")')], "or is a mean"),
        "one by one": Bad(
            "def finish(grads, sequence_parallel):\n"
            "    endings = ('norm.weight',) if sequence_parallel else ('q_norm.weight', 'k_norm.weight')\n"
            "    for name, grad in grads.items():\n"
            "        if name.endswith(endings):\n"
            "            comm.all_reduce(grad)",
            "messages per rank; one is enough",
        ),
        "everything": Bad([('("norm.weight",)', '("weight",)')], "was complete"),
    },
    "block-3": {
        "as it was": Bad([(_DX, _SLICE), (_DW, _OWN)], "dx differs from one process"),
        "dx alone": Bad([(_DW, _OWN)], "dfirst"),
        "dW alone": Bad([(_DX, _SLICE)], "What the other ranks found out"),
        "own dW, summed over the ranks": Bad(
            [(_DW, _OWN + "\n        dw = dw.contiguous()\n        comm.all_reduce(dw)")], "dfirst"
        ),
        "a mean": Bad([(_DX, _DX + " / comm.get_world_size()")], "dx is 0.5 times"),
        "whole sum": Bad(
            [
                (
                    _DX,
                    "whole = (grad @ weight).contiguous()\n        comm.all_reduce(whole)\n"
                    "        dx = whole.chunk(comm.get_world_size(), -2)[comm.get_rank()]",
                )
            ],
            "in the backward the ranks sent",
        ),
        "the page's operators": Bad(
            """
class Gather(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: gather(x))
    backward = staticmethod(lambda ctx, grad: scatter(grad))

class Scatter(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: scatter(x))
    backward = staticmethod(lambda ctx, grad: gather(grad))

def pair(x, first, second):
    return Scatter.apply(linear(torch.tanh(linear(Gather.apply(x), first)), second))
""",
            "in the backward the ranks sent",
        ),
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
        "past the ledger": Bad(
            """
def finish(grads, sequence_parallel):
    import torch.distributed as dist
    endings = ("norm.weight",) if sequence_parallel else ("q_norm.weight", "k_norm.weight")
    for name, grad in grads.items():
        if name.endswith(endings):
            dist.all_reduce(grad)
""",
            "0 messages per rank; one is enough",
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
