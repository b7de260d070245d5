"""Typical wrong answers and lazy cheats of the exercises on ZeRO-1."""

from bad_answer import Bad

THREE, FOUR, PART = "zero_1-3", "zero_1-4", "zero_1-5"

TYPICAL = {
    PART: {
        "a shard that keeps everything": Bad(
            [("new_zeros(size) for", "new_zeros(len(ranks), size)[0] for")],
            "a slice of a large tensor keeps all of it alive",
        ),
        "averages": Bad(
            [("_in_one_row(grads, num), self.ranks)", "_in_one_row(grads, num), self.ranks) / num")],
            "the gradients are summands",
        ),
        "clears the gradients": Bad(
            [("numbers.view_as(parameter))", "numbers.view_as(parameter))\n            parameter.grad = None")],
            "step has changed .grad",
        ),
    },
    THREE: {
        "squared in place": Bad([("+ size].square().sum()", "+ size].square_().sum()")], "the optimizer reads it next"),
        "rounded down": Bad([("-(-len(flat) // N)", "len(flat) // N")], "5 numbers on 2 rank(s)"),
        "root of a sum of norms": Bad([(".square().sum()", ".norm()")], "add squares, not norms"),
    },
}

CHEATS = {
    PART: {
        "torch's own": Bad(
            """
import torch
from mine.ring import all_reduce


class ShardedAdam:
    def __init__(self, parameters, ranks, lr, betas=(0.9, 0.999), eps=1e-8):
        self.parameters, self.ranks = list(parameters), ranks
        self.adam = torch.optim.Adam(self.parameters, lr, betas, eps)

    def step(self):
        for parameter in self.parameters:
            all_reduce(parameter.grad, self.ranks)
        self.adam.step()
""",
            "torch.optim is off in zero1",
        ),
        "sums everything on every rank": Bad(
            [
                ("all_gather, padded, reduce_scatter", "all_gather, all_reduce, padded"),
                (
                    "grad = reduce_scatter(_in_one_row(grads, num), self.ranks)",
                    "row = _in_one_row(grads, num)\n        all_reduce(row, self.ranks)\n"
                    "        grad = row.view(num, -1)[me].clone()",
                ),
            ],
            "a reduce-scatter of the gradients and an all-gather of the weights",
        ),
    },
    THREE: {
        "the whole buffer": Bad("def norm_of_shards(flat):\n    return float(flat.norm())", "4 numbers on 2 rank(s)"),
    },
}
