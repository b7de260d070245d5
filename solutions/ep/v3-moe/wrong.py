"""Typical wrong answers and lazy cheats of the exercises on V3's layer of experts."""

from bad_answer import Bad

_HOOK = "        if weights.requires_grad:\n            weights.register_hook(lambda grad: self._count(load))"
_SUM = "    comm.all_reduce(load)\n"

TYPICAL = {
    "v3_moe-6": {
        "weights with the bias": Bad(
            [("weights = scores.gather(-1, chosen)", "weights = (scores + bias).gather(-1, chosen)")],
            "weights: the bias is part of the weights; it only chooses",
        ),
        "closed by a zero": Bad([("-torch.inf)", "0.0)")], "whose group is not kept; values can be below 0"),
        "a view of no tokens": Bad(
            [(".unflatten(-1, (num_groups, -1))", ".view(len(x), num_groups, -1)")],
            "0 token(s), 2 of 8 experts from 2 of 4 group(s), biases: rank 0 raised RuntimeError: cannot reshape",
        ),
    },
    "v3_moe-3": {
        "no call without gradients": Bad([("        if weights.requires_grad:\n    ", "")], "doesn't require gradient"),
        "weights with the bias": Bad(
            [("chosen = scores.gather(1, indices)", "chosen = (scores + self.bias).gather(1, indices)")],
            "the bias helps to choose and is no part of a weight",
        ),
        "chosen without the bias": Bad([("scores.detach() + self.bias", "scores.detach()")], "other experts"),
    },
    "v3_moe-4": {
        "own load": Bad([(_SUM, "")], "different biases"),
        "by the distance": Bad(
            [("torch.sign(load.double().mean() - load)", "(load.double().mean() - load)")], "times the speed"
        ),
        "only those that have some": Bad(
            [(_SUM, "    if microbatches:\n        comm.all_reduce(load)\n")], "1, 3, 0 microbatches"
        ),
    },
    "v3_moe-5": {
        "as it was": Bad([("second.where(second > -torch.inf, 0)", "second")], "alive and is worth"),
        "nobody is worth nothing": Bad(
            [("    return best + ", "    return best.where(best > -torch.inf, 0) + ")], "has no expert alive"
        ),
    },
}

CHEATS = {
    "v3_moe-6": {
        "the course's own": Bad("from dualpipe_ours.router import choose", "line 1: dualpipe_ours is the course's own"),
    },
    "v3_moe-3": {
        "as it was": Bad(
            [
                (
                    _HOOK,
                    "        self._count(load)",
                )
            ],
            "evaluate, train: load",
        ),
    },
    "v3_moe-4": {
        "nothing moves": Bad("def train_step(router, microbatches, speed):\n    pass", "moved by 0 times"),
    },
    "v3_moe-5": {
        "all are equal": Bad(
            "def worth(values, alive, num_groups):\n    return values.new_zeros(len(values), num_groups)",
            "alive and is worth",
        ),
    },
}
