"""Typical wrong answers and lazy cheats of the exercises on GShard."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "slots, sent_bytes, dropped, first_dropped = "
_ASSIGN = "def assign(indices, num_experts, num_slots_each):\n"

TYPICAL = {
    "gshard-1": {
        "no factor": Bad(_PREDICT + "4, 7680, 6, 4", "comes on top"),
        "one way": Bad(_PREDICT + "5, 3840, 6, 4", "travel the same two ways"),
        "own slots travel": Bad(_PREDICT + "5, 10240, 6, 4", "belong to this rank's own experts"),
    },
    "gshard-2": {
        "token by token": Bad(
            [
                ("indices.t().reshape(-1)", "indices.reshape(-1)"),
                ("slots.view(indices.shape[1], -1).t()", "slots.view(indices.shape)"),
            ],
            "come before second choices of earlier ones",
        ),
        "second choices from zero": Bad(
            _ASSIGN + "    out = torch.full_like(indices, -1)\n"
            "    for k in range(indices.shape[1]):\n"
            "        used = [0] * num_experts\n"
            "        for t, expert in enumerate(indices[:, k].tolist()):\n"
            "            if used[expert] < num_slots_each:\n"
            "                out[t, k] = expert * num_slots_each + used[expert]\n"
            "            used[expert] += 1\n"
            "    return out",
            "a slot has two tokens",
        ),
        "one too many": Bad([("place < num_slots_each", "place <= num_slots_each")], "expected"),
    },
}

CHEATS = {
    "gshard-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "slots = sent_bytes = dropped = first_dropped = Anything()", "must be a whole number"
        ),
    },
    "gshard-2": {
        "the library's own": Bad(
            _ASSIGN + "    from dualpipe_lab.ep.gshard import find_slots\n"
            "    return find_slots(indices, num_experts, num_slots_each)",
            "switched off",
        ),
    },
}
