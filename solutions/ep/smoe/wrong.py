"""Typical wrong answers and lazy cheats of the exercises on layers of experts."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "for_0, for_1, on_arrival, regrouped, sent = "

TYPICAL = {
    "smoe-1": {
        "own rank alone": Bad(_PREDICT + "2, 3, 2, 5, 320", "rank 1's tokens choose expert 0 too"),
        "other rank alone": Bad(_PREDICT + "5, 2, 2, 5, 320", "come from rank 1 alone"),
        "regrouped at once": Bad(_PREDICT + "5, 3, 5, 5, 320", "its place after the regroup"),
    },
    "smoe-2": {
        "empty left out": Bad(
            [("dy.T @ x for dy, x in parts]", "dy.T @ x for dy, x in parts if len(x)]")], "dW has shape [2, 3, 4]"
        ),
        "dW without weights": Bad([("(w[:, None] * h).split", "h.split")], "dW differs"),
        "weighted twice": Bad([("(back * h).sum(1)", "(w[:, None] * back * h).sum(1)")], "dw: that times the weight"),
    },
    "smoe-3": {
        "regrouped there only": Bad([("    rows = rows[major.argsort()]\n", "")], "other experts' results"),
        "as it was": Bad(
            [("    rows = rows[major]\n", ""), ("    rows = rows[major.argsort()]\n", "")], "2 rank(s), 4 experts"
        ),
    },
    "smoe-4": {
        "averaged over copies": Bad(
            [("comm.all_reduce(parameter.grad, group=copies)", 'comm.all_reduce(parameter.grad, "avg", copies)')],
            "ep 1 x edp 2: rank 0: the gradient of the experts is 0.5 times",
        ),
        "not summed": Bad(
            [
                (
                    "        if copies is not None:\n            comm.all_reduce(parameter.grad, group=copies)\n",
                    "",
                )
            ],
            "ep 1 x edp 2: rank 0: the gradient of the experts differs",
        ),
        "summed over all": Bad(
            [
                (
                    "        if copies is not None:\n            comm.all_reduce(parameter.grad, group=copies)\n",
                    "        comm.all_reduce(parameter.grad)\n",
                )
            ],
            "ep 2 x edp 1",
        ),
    },
}

CHEATS = {
    "smoe-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "for_0 = for_1 = on_arrival = regrouped = sent = Anything()", "must be a whole number"
        ),
    },
    "smoe-2": {
        "the library's own": Bad(
            """
from dualpipe_lab.ep.moe.experts import grouped_product, grouped_weight_grad
def input_grad(grad, h, w, weights, counts):
    back = grouped_product(grad, weights.mT, counts)
    return w[:, None] * back, (back * h).sum(1)
def weight_grad(grad, h, w, counts):
    return grouped_weight_grad(grad, w[:, None] * h, counts)
""",
            "the library's own is switched off",
        ),
    },
    "smoe-3": {
        "gathers the experts": Bad(
            """
def layer(x, experts, weights, num_experts):
    every = weights.new_empty(comm.get_world_size() * len(weights), *weights.shape[1:])
    comm.all_gather_single(every, weights.contiguous())
    return torch.einsum("tkoi,ti->to", every[experts], x)
""",
            "no expert travels",
        ),
        "stays at home": Bad(
            "def layer(x, experts, weights, num_experts):\n"
            "    return x * (experts % len(weights) + 1).sum(1, keepdim=True)",
            "2 rank(s), 2 experts",
        ),
    },
    "smoe-4": {
        "does nothing": Bad(
            "def finish(router, experts, copies, num_tokens):\n    return None", "the gradient of the router"
        ),
    },
}
