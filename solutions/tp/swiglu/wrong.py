"""Typical wrong answers and lazy cheats of the exercises on SwiGLU."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "held, kept, one_sum, two_sums = "

TYPICAL = {
    "swiglu-1": {
        "two weights": Bad(_PREDICT + "320, 216, 576, 1152", "are three"),
        "x cut": Bad(_PREDICT + "480, 144, 576, 1152", "keeps all of it"),
        "keeps the product": Bad(_PREDICT + "480, 276, 576, 1152", "computed again"),
        "sums the middle": Bad(_PREDICT + "480, 216, 1440, 1152", "it stays cut"),
        "fused anyway": Bad(_PREDICT + "480, 216, 576, 576", "a sum of its own"),
    },
    "swiglu-2": {
        "no sum": Bad([("    comm.all_reduce(dx)\n", "")], "the ranks have partial sums"),
        "one sum per branch": Bad(
            [
                (
                    "    dx = da @ gate + du @ up\n    comm.all_reduce(dx)\n",
                    "    dx, other = da @ gate, du @ up\n    comm.all_reduce(dx)\n    comm.all_reduce(other)\n"
                    "    dx = dx + other\n",
                )
            ],
            "a rank adds them before it sends",
        ),
        "gate's branch alone": Bad([("da @ gate + du @ up", "da @ gate")], "rank 0: dx differs"),
        "derivative of the sigmoid": Bad([("s * (1 + C * a * (1 - s))", "s * (1 - s)")], "rank 0: dx differs"),
        "the derivative of silu": Bad([("(1 + C * a", "(1 + a")], "rank 0: dx differs"),
        "spoils a in the end": Bad(
            [("    return dx, da", "    a.zero_()\n    return dx, da")], "the argument a has changed"
        ),
        "gate and up exchanged": Bad([("da.T @ x, du.T @ x", "du.T @ x, da.T @ x")], "dgate differs"),
        "averages": Bad([("comm.all_reduce(dx)", 'comm.all_reduce(dx, "avg")')], "dx is 0.5 times that of one process"),
        "overwrites u": Bad([("da = dh * u * s", "da = u.mul_(dh) * s")], "the argument u has changed"),
    },
    "swiglu-3": {
        "cuts right, joins as before": Bad(
            [("    gates, ups = zip(*(part.chunk(2) for part in parts))\n", ""), ("[*gates, *ups]", "parts")],
            "the outputs are right, but the parts joined are rows [0, 2, 1, 3]",
        ),
        "every second row": Bad(
            [("half.chunk(num_ranks)[rank]", "half[rank::num_ranks]")],
            "those of neighbouring features, not of [0, 2, 4]",
        ),
        "all rows of gate": Bad([("half.chunk(num_ranks)[rank]", "half")], "2 features on 2 rank(s), rank 0: its part"),
    },
}

CHEATS = {
    "swiglu-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "held = kept = one_sum = two_sums = Anything()", "must be a whole number"
        ),
    },
    "swiglu-2": {
        "autograd": Bad(
            """
def gated_backward(dy, x, a, u, gate, up, down):
    leaves = [t.detach().requires_grad_() for t in (x, gate, up, down)]
    with torch.enable_grad():
        x, gate, up, down = leaves
        y = ((x @ gate.T) * (C * (x @ gate.T)).sigmoid() * (x @ up.T)) @ down.T
    return torch.autograd.grad(y, leaves, dy)
""",
            "the library's own is switched off",
        ),
        "gathers everything": Bad(
            [
                (
                    "    comm.all_reduce(dx)\n",
                    "    import torch.distributed as dist\n    parts = [None] * comm.get_world_size()\n"
                    "    dist.all_gather_object(parts, dx)\n    dx = sum(parts)\n",
                )
            ],
            "in the backward the ranks sent 0 bytes",
        ),
    },
    "swiglu-3": {
        "as it was": Bad(
            "def cut(gate_up, rank, num_ranks):\n    return gate_up.chunk(num_ranks)[rank]\n\n\n"
            "def join(parts):\n    return torch.cat(parts)",
            "row 0 is taken for gate here and row 1 for up",
        ),
    },
}
