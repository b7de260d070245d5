"""Typical wrong answers and lazy cheats of the exercises on layers of experts."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "for_0, for_1, on_arrival, regrouped, sent = "

TYPICAL = {
    "smoe-1": {
        "own rank alone": Bad(_PREDICT + "2, 3, 2, 5, 320", "rank 1's tokens choose expert 0 too"),
        "other rank alone": Bad(_PREDICT + "5, 2, 2, 5, 320", "come from rank 1 alone"),
        "regrouped at once": Bad(_PREDICT + "5, 3, 5, 5, 320", "its place after the regroup"),
        "never regrouped": Bad(_PREDICT + "5, 3, 2, 2, 320", "its place on arrival"),
        "dispatch alone": Bad(_PREDICT + "5, 3, 2, 5, 160", "sends the results of others' rows home"),
        "all slots": Bad(_PREDICT + "5, 3, 2, 5, 512", "own experts do not travel"),
    },
    "smoe-2": {
        "transposed": Bad([("dy @ weight for", "dy @ weight.T for")], "shapes cannot be multiplied"),
        "dW transposed": Bad([("dy.T @ x for", "x.T @ dy for")], "dW has shape [1, 4, 3], needs [1, 3, 4]"),
        "empty left out": Bad(
            [("dy.T @ x for dy, x in parts]", "dy.T @ x for dy, x in parts if len(x)]")], "dW has shape [2, 3, 4]"
        ),
        "one expert": Bad([("dy @ weight for dy, weight", "dy @ weights[0] for dy, weight")], "dh differs"),
        "in float32": Bad(
            [("dy @ weight for", "(dy.float() @ weight.float()).double() for")], "any float64 numbers: dh"
        ),
        "in bfloat16": Bad(
            [("dy.T @ x for", "(dy.bfloat16().T @ x.bfloat16()).to(dy.dtype) for")], "any float64 numbers: dW"
        ),
        "the page's, without weights": Bad(
            [("w[:, None] * back, ", "back, "), ("(w[:, None] * h).split", "h.split")], "dh differs"
        ),
        "dW without weights": Bad([("(w[:, None] * h).split", "h.split")], "dW differs"),
        "weighted twice": Bad([("(back * h).sum(1)", "(w[:, None] * back * h).sum(1)")], "dw: that times the weight"),
        "divided by the weight": Bad(
            [("(back * h).sum(1)", "(w[:, None] * back * h).sum(1) / w")], "dw differs from one expert after another"
        ),
        "the result again": Bad(
            """
def input_grad(grad, h, w, weights, counts):
    out = torch.cat([x @ weight.T for x, weight in zip(h.split(counts), weights)])
    back = torch.cat([dy @ weight for dy, weight in zip((w[:, None] * grad).split(counts), weights)])
    return back, (grad * out).sum(1)

def weight_grad(grad, h, w, counts):
    return torch.stack([dy.T @ x for dy, x in zip((w[:, None] * grad).split(counts), h.split(counts))])
""",
            "W h is not made again",
        ),
        "all experts on all rows": Bad(
            """
def input_grad(grad, h, w, weights, counts):
    every = torch.einsum("ro,eoi->rei", grad, weights)
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    back = every[torch.arange(len(grad)), expert]
    return w[:, None] * back, (back * h).sum(1)

def weight_grad(grad, h, w, counts):
    return torch.stack([dy.T @ x for dy, x in zip((w[:, None] * grad).split(counts), h.split(counts))])
""",
            "A row meets the matrix of its own expert alone",
        ),
        "one gradient": Bad([("back, (back * h).sum(1)", "back")], "returns two tensors"),
    },
    "smoe-3": {
        "regrouped there only": Bad([("    rows = rows[major.argsort()]\n", "")], "other experts' results"),
        "the wrong inverse": Bad([("rows[major.argsort()]", "rows[major]")], "other experts' results"),
        "as it was": Bad(
            [("    rows = rows[major]\n", ""), ("    rows = rows[major.argsort()]\n", "")], "2 rank(s), 4 experts"
        ),
    },
    "smoe-4": {
        "averaged over copies": Bad(
            [("comm.all_reduce(parameter.grad, group=copies)", 'comm.all_reduce(parameter.grad, "avg", copies)')],
            "ep 1 x edp 2: rank 0: the gradient of the experts is 0.5 times",
        ),
        "as it was": Bad(
            [
                (
                    "    for parameter in experts:\n",
                    "    total = torch.tensor(num_tokens)\n    if copies is not None:\n"
                    "        comm.all_reduce(total, group=copies)\n    for parameter in experts:\n",
                )
            ],
            "ep 2 x edp 1: rank 0: the gradient of the experts is 2.333 times",
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
        "not a number": Bad(
            [("parameter.grad /= total", "parameter.grad *= float('nan')")], "differs from one process"
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
        "autograd": Bad(
            """
def input_grad(grad, h, w, weights, counts):
    with torch.enable_grad():
        h, w = h.requires_grad_(), w.requires_grad_()
        out = torch.cat([part @ weight.T for part, weight in zip(h.split(counts), weights)])
        return torch.autograd.grad(w[:, None] * out, (h, w), grad)

def weight_grad(grad, h, w, counts):
    return torch.stack([dy.T @ x for dy, x in zip((w[:, None] * grad).split(counts), h.split(counts))])
""",
            "switched off",
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
        "gathers the tokens": Bad(
            """
def layer(x, experts, weights, num_experts):
    rank, share = comm.get_rank(), len(weights)
    parts = comm.all_gather_object((x, experts))
    rows, chosen = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    y = torch.zeros_like(rows)
    for e, weight in enumerate(weights):
        y += (chosen == rank * share + e).sum(1, keepdim=True) * (rows @ weight.T)
    comm.all_reduce(y)
    first = sum(len(p[0]) for p in parts[:rank])
    return y[first : first + len(x)]
""",
            "nor a row to ranks that it has not chosen",
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
