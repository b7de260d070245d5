"""Typical wrong answers and lazy cheats of the exercises on balancing experts."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "replicas, heaviest, moved_mib, summed_mib = "
_SHARE = "key=lambda i: loads[i] / counts[i])"

TYPICAL = {
    "eplb-1": {
        "by raw load": Bad(_PREDICT + "3, 15, 9, 6", "still the heaviest share"),
        "packs by raw load": Bad(_PREDICT + "2, 15, 9, 6", "three replicas"),
        "the lighter rank": Bad(_PREDICT + "2, 13, 9, 6", "the heavier one"),
        "all-reduce of all": Bad(_PREDICT + "2, 14, 9, 12", "number of replicas"),
    },
    "eplb-2": {
        "by raw load": Bad([(_SHARE, "key=lambda i: loads[i])")], "the heaviest replica has"),
        "round robin": Bad(
            [("lightest = min(free, key=lambda r: totals[r])", "lightest = min(free, key=lambda r: len(ranks[r]))")],
            "the replicas are right",
        ),
        "light ones first": Bad([("-loads[i] / counts[i]", "loads[i] / counts[i]")], "the replicas are right"),
        "no limit of slots": Bad(
            [("if len(ranks[r]) < num_slots // num_ranks", "if True")], "the replicas are right, the heaviest rank"
        ),
        "drops the idle": Bad(
            [("for rank in ranks for expert in rank]", "for rank in ranks for expert in rank if loads[expert]]")],
            "every rank has equally many",
        ),
    },
    "eplb-3": {
        "one change": Bad([("plan = [", "plan = [0, 6, 2, 4, 5, 3, 1, 8, 7, 1, 7, 8]\nrest = [")], "ranks 147"),
        "three changes": Bad(
            [("plan = [", "plan = [0, 6, 2, 4, 8, 3, 3, 8, 7, 1, 8, 5]\nrest = [")], "below the plan from scratch"
        ),
        "five changes": Bad([("plan = [", "plan = [8, 6, 8, 4, 2, 3, 1, 8, 0, 8, 7, 5]\nrest = [")], "5 slots hold"),
        "evicts an expert": Bad(
            [("plan = [", "plan = [0, 8, 2, 4, 5, 3, 1, 8, 7, 1, 7, 8]\nrest = [")], "expert 6 has no slot"
        ),
    },
    "eplb-4": {
        "clamps": Bad([("counts[chosen]]", "slots.shape[1]].clamp(min=0)")], "and slot 0 holds"),
        "the first replica": Bad([("number % counts[chosen]", "0 * number")], "they take turns"),
        "by place in the batch": Bad(
            [("number % counts[chosen]", "torch.arange(len(chosen)) % counts[chosen]")], "they take turns"
        ),
    },
}

CHEATS = {
    "eplb-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "replicas = heaviest = moved_mib = summed_mib = Anything()", "must be a whole number"
        ),
    },
    "eplb-2": {
        "the library's own": Bad(
            "def make_plan(loads, num_slots, num_ranks):\n"
            "    return rebalance_experts([loads], num_slots, 1, 1, num_ranks)[0][0].tolist()",
            "the library's own is switched off",
        ),
        "nothing replicated": Bad(
            "def make_plan(loads, num_slots, num_ranks):\n    return [i % len(loads) for i in range(num_slots)]",
            "the heaviest replica has",
        ),
    },
    "eplb-3": {
        "from scratch": Bad("plan = scratch[0][0].tolist()", "12 slots hold another expert"),
        "the library's sticky plan": Bad(
            "from dualpipe_lab.ep.eplb import rebalance_sticky\n"
            "plan = rebalance_sticky([loads], torch.tensor([in_force]), 4, 4)[0][0].tolist()",
            "ranks 147, 47, 179.5, 179.5",
        ),
    },
    "eplb-4": {
        "as it was": Bad([("counts[chosen]]", "slots.shape[1]]")], "-1 means no further replica"),
    },
}
