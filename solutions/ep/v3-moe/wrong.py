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
        "biased weight": Bad(_PREDICT + "6291456, 8, 2112, 3, 51", "for the selection alone"),
        "group by its best": Bad(_PREDICT + "6291456, 8, 2112, 4, 40", "sum of its two best"),
    },
    "v3_moe-2": {
        "the page's": Bad(
            """
def choose(values, k, num_groups, num_kept):
    grouped = values.unflatten(1, (num_groups, -1))
    worth = grouped.topk(min(2, grouped.shape[2])).values.sum(2)
    mask = torch.full_like(worth, -torch.inf)
    mask.scatter_(1, worth.topk(num_kept).indices, 0.0)
    return (grouped + mask[..., None]).flatten(1).topk(k).indices
""",
            "are to be chosen",
        ),
        "masked with zeros": Bad([("~left, -torch.inf", "~left, 0.0")], "are to be chosen"),
        "masked with -10": Bad([("~left, -torch.inf", "~left, -10.0")], "are to be chosen"),
        "a group by its best": Bad(
            [("grouped.topk(min(2, grouped.shape[2])).values.sum(2)", "grouped.amax(2)")], "which is not kept"
        ),
        "two of every group": Bad([("min(2, grouped.shape[2])", "2")], "RuntimeError"),
        "a group by its sum": Bad([("grouped.topk(min(2, grouped.shape[2])).values.sum(2)", "grouped.sum(2)")], "kept"),
        "the firsts first": Bad(
            [
                (
                    "    return chosen.gather(1, first(values.gather(1, chosen), k))",
                    "    return torch.cat([best, rest], 1)",
                )
            ],
            "not the best first",
        ),
        "equals by chance": Bad(
            [
                ("sort(dim=1, descending=True, stable=True)", "flip(1).sort(dim=1, descending=True, stable=True)"),
                (".indices[:, :n]", ".indices[:, :n].mul(-1).add(x.shape[1] - 1)"),
            ],
            "equals not by number",
        ),
    },
    "v3_moe-3": {
        "where gradients are on": Bad(
            [
                (
                    _HOOK,
                    "        if weights.requires_grad:\n            self._count(load)",
                )
            ],
            "train, forget: load",
        ),
        "halved": Bad(
            [
                (
                    _HOOK,
                    "        self._count(load // 2)",
                )
            ],
            "train: load",
        ),
        "no call without gradients": Bad([("        if weights.requires_grad:\n    ", "")], "doesn't require gradient"),
        "weights with the bias": Bad(
            [("chosen = scores.gather(1, indices)", "chosen = (scores + self.bias).gather(1, indices)")],
            "the bias helps to choose and is no part of a weight",
        ),
        "chosen without the bias": Bad([("scores.detach() + self.bias", "scores.detach()")], "other experts"),
        "once and for all": Bad(
            [("        if weights.requires_grad:", "        if weights.requires_grad and not self.load.any():")],
            "train, train: load",
        ),
    },
    "v3_moe-4": {
        "own load": Bad([(_SUM, "")], "different biases"),
        "every microbatch": Bad(
            [
                ("    for x in microbatches:\n        load += router.load_of(x)\n", ""),
                (
                    _SUM,
                    "    for number in range(3):\n"
                    "        some = microbatches[number : number + 1]\n"
                    "        load = sum((router.load_of(x) for x in some), torch.zeros_like(load))\n"
                    "        comm.all_reduce(load)\n"
                    "        router.bias += speed * torch.sign(load.double().mean() - load)\n"
                    "    load = load * 0\n",
                ),
            ],
            "its bias moved by",
        ),
        "upwards": Bad([("load.double().mean() - load", "load - load.double().mean()")], "its bias moved by -"),
        "by the distance": Bad(
            [("torch.sign(load.double().mean() - load)", "(load.double().mean() - load)")], "times the speed"
        ),
        "one message per microbatch": Bad(
            [
                ("    for x in microbatches:\n        load += router.load_of(x)\n", ""),
                (
                    _SUM,
                    "    for number in range(3):\n"
                    "        part = torch.zeros_like(load)\n"
                    "        for x in microbatches[number : number + 1]:\n"
                    "            part += router.load_of(x)\n"
                    "        comm.all_reduce(part)\n"
                    "        load += part\n",
                ),
            ],
            "one sum of all loads is enough",
        ),
        "the floor of the mean": Bad(
            [("load.double().mean() - load", "load.sum() // len(load) - load")],
            "one apart: expert 1 had 2 tokens of 14",
        ),
        "the rounded mean": Bad(
            [("load.double().mean() - load", "load.double().mean().round() - load")], "times the speed"
        ),
        "a short distance": Bad(
            [("torch.sign(load.double().mean() - load)", "(load.double().mean() - load).clamp(-1, 1)")],
            "times the speed",
        ),
        "only those that have some": Bad(
            [(_SUM, "    if microbatches:\n        comm.all_reduce(load)\n")], "1, 3, 0 microbatches"
        ),
    },
    "v3_moe-5": {
        "as it was": Bad([("second.where(second > -torch.inf, 0)", "second")], "alive and is worth"),
        "masked with zeros": Bad([("~alive, -torch.inf", "~alive, 0.0")], "alive and is worth"),
        "a large number": Bad([("~alive, -torch.inf", "~alive, -1e9")], "alive and is worth"),
        "nobody is worth nothing": Bad(
            [("    return best + ", "    return best.where(best > -torch.inf, 0) + ")], "has no expert alive"
        ),
        "the best alone": Bad([("best + second.where(second > -torch.inf, 0)", "best")], "alive and is worth"),
        "the dead count": Bad([("values.masked_fill(~alive, -torch.inf)", "values")], "alive and is worth"),
        "no number": Bad([("return best +", "return best - best +")], "alive and is worth"),
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
        "the same for all": Bad(
            "def choose(values, k, num_groups, num_kept):\n    return torch.arange(k).expand(len(values), k)", "kept"
        ),
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
        "rank 0 decides": Bad([(_SUM, "    comm.broadcast(load, src=0)\n")], "its bias moved by"),
    },
    "v3_moe-5": {
        "all are equal": Bad(
            "def worth(values, alive, num_groups):\n    return values.new_zeros(len(values), num_groups)",
            "alive and is worth",
        ),
    },
}
