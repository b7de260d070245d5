"""Typical wrong answers and lazy cheats of the exercises on V3's layer of experts."""

from bad_answer import Bad

_HOOK = "        if weights.requires_grad:\n            weights.register_hook(lambda grad: self._count(load))"

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
}
