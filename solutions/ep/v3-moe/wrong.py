"""Typical wrong answers and lazy cheats of the exercises on V3's layer of experts."""

from bad_answer import EQUAL_TO_ALL, Bad

_HOOK = "        if weights.requires_grad:\n            weights.register_hook(lambda grad: self._count(load))"
_PREDICT = "parameters, experts, row_bytes, first, percent = "
_SUM = "    comm.all_reduce(load)\n"

TYPICAL = {
    "v3_moe-1": {
        "two matrices": Bad(_PREDICT + "4194304, 8, 2112, 3, 40", "three matrices"),
        "routed alone": Bad(_PREDICT + "6291456, 6, 2112, 3, 40", "shared ones too"),
        "no scales": Bad(_PREDICT + "6291456, 8, 2048, 3, 40", "the scales travel"),
    },
    "v3_moe-2": {
        "masked with zeros": Bad([("~left, -torch.inf", "~left, 0.0")], "are to be chosen"),
        "a group by its best": Bad(
            [("grouped.topk(min(2, grouped.shape[2])).values.sum(2)", "grouped.amax(2)")], "which is not kept"
        ),
        "two of every group": Bad([("min(2, grouped.shape[2])", "2")], "RuntimeError"),
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
    "v3_moe-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "parameters = experts = row_bytes = first = percent = Anything()", "must be a whole number"
        ),
    },
    "v3_moe-2": {
        "the library's own": Bad("choose = group_limited_topk", "the library's own is switched off"),
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
