"""Typical wrong answers and lazy cheats of the exercises on V3's layer of experts."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "parameters, experts, row_bytes, first, percent = "
_INF = "torch.full_like(worth, -torch.inf)\n    mask.scatter_(1, worth.topk(num_kept).indices, 0.0)"
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
        "masked with zeros": Bad(
            [("(grouped + mask[..., None])", "torch.where(mask[..., None] == 0, grouped, 0.0)")], "which is not kept"
        ),
        "a group by its best": Bad(
            [("grouped.topk(min(2, grouped.shape[2])).values.sum(2)", "grouped.amax(2)")], "which is not kept"
        ),
        "two of every group": Bad([("min(2, grouped.shape[2])", "2")], "RuntimeError"),
        "a group by its sum": Bad([("grouped.topk(min(2, grouped.shape[2])).values.sum(2)", "grouped.sum(2)")], "kept"),
        "by number": Bad([("topk(k).indices", "topk(k).indices.sort().values")], "not the best first"),
        "masked with -10": Bad([("-torch.inf", "-10.0")], "which is not kept"),
        "no groups": Bad([("grouped + mask[..., None]", "grouped + 0 * worth[..., None]")], "which is not kept"),
    },
    "v3_moe-3": {
        "as if without scale": Bad([("scale * chosen", "chosen")], "They add up to 2.5"),
        "over all experts": Bad([("chosen.sum(1", "scores.sum(1")], "They add up to"),
        "not chosen by the bias": Bad([("scores.detach() + bias", "scores.detach()")], "score plus bias"),
        "a constant sum": Bad([("chosen.sum(1, keepdim=True)", "chosen.sum(1, keepdim=True).detach()")], "sum too"),
        "softmax": Bad([("(x @ router.T).sigmoid()", "(x @ router.T).softmax(1)")], "differ from"),
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
        "minus one": Bad([("-torch.inf", "-1.0")], "which is not kept"),
        "a large number": Bad([("-torch.inf", "-1e4")], "which is not kept"),
        "a larger number": Bad([("-torch.inf", "-1e9")], "which is not kept"),
        "a huge number is subtracted": Bad(
            [("masked_fill(~kept[..., None], -torch.inf)", "sub(~kept[..., None] * 1e30)")], "is not kept"
        ),
        "one less than the least": Bad([("-torch.inf", "float(values.min()) - 1")], "is not kept"),
        "the other groups": Bad([("~kept", "kept")], "which is not kept"),
        "kept are shifted": Bad(
            [("masked_fill(~kept[..., None], -torch.inf)", "add(kept[..., None] * 10)")], "is not kept"
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
        "the same for all": Bad(
            "def choose(values, k, num_groups, num_kept):\n    return torch.arange(k).expand(len(values), k)", "kept"
        ),
    },
    "v3_moe-3": {
        "as it was": Bad(
            [
                ("(x @ router.T).sigmoid()", "(x @ router.T).sigmoid() + bias"),
                ("scores.detach() + bias", "scores.detach()"),
            ],
            "a bias has no part in them",
        ),
    },
    "v3_moe-4": {
        "nothing moves": Bad("def train_step(router, microbatches, speed):\n    pass", "moved by 0 times"),
        "rank 0 decides": Bad([(_SUM, "    comm.broadcast(load, src=0)\n")], "its bias moved by"),
    },
    "v3_moe-5": {
        "as it was": Bad([("masked_fill(~kept[..., None], -torch.inf)", "mul(kept[..., None])")], "which is not kept"),
        "one group": Bad(
            "def mask(values, kept):\n"
            "    size = values.shape[1] // kept.shape[1]\n"
            "    return kept.repeat_interleave(size, 1).double()",
            "are kept, and",
        ),
    },
}
