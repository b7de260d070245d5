"""Typical wrong answers and lazy cheats of the exercises on balancing experts."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "replicas, heaviest, moved_mib, summed_mib = "

TYPICAL = {
    "eplb-1": {
        "by raw load": Bad(_PREDICT + "3, 15, 9, 6", "still the heaviest share"),
        "packs by raw load": Bad(_PREDICT + "2, 15, 9, 6", "three replicas"),
        "the lighter rank": Bad(_PREDICT + "2, 13, 9, 6", "the heavier one"),
        "all-reduce of all": Bad(_PREDICT + "2, 14, 9, 12", "number of replicas"),
    },
    "eplb-2": {
        "by raw load": Bad(
            [("key=lambda i: loads[i] / counts[i])", "key=lambda i: loads[i])")], "the heaviest replica has"
        ),
        "no limit of replicas": Bad([("if n < most]", "if n < 99]")], "expert 0 has"),
        "stops at the first that is full": Bad(
            [
                (
                    "        if allowed:\n",
                    "        allowed = [max(range(len(loads)), key=lambda i: loads[i] / counts[i])]\n"
                    "        if counts[allowed[0]] < most:\n",
                )
            ],
            "slot(s) stay empty",
        ),
        "one speed": Bad([("(totals[r] + shares[expert]) / speeds[r]", "totals[r]")], "the replicas are right"),
        "done first without it": Bad(
            [("(totals[r] + shares[expert]) / speeds[r]", "totals[r] / speeds[r]")], "the replicas are right"
        ),
        "light ones first": Bad([("key=lambda i: -shares[i]", "key=lambda i: shares[i]")], "the replicas are right"),
        "no limit of slots": Bad([("if len(held) < room]", "]")], "the plan has"),
        "no empty slots": Bad([(" + [-1] * (room - len(held))", "")], "every rank has equally many"),
        "drops the idle": Bad([("in sorted(replicas,", "in sorted([i for i in replicas if loads[i]],")], "has no slot"),
        "the page's": Bad(
            """
def make_plan(loads, num_slots, speeds, most):
    counts, replicas = [1] * len(loads), list(range(len(loads)))
    while len(replicas) < num_slots:
        shares = [load / n for load, n in zip(loads, counts)]
        replicas.append(shares.index(max(shares)))
        counts[replicas[-1]] += 1
    room, shares = num_slots // len(speeds), [loads[i] / counts[i] for i in replicas]
    packs, totals = [[] for _ in speeds], [0.0] * len(speeds)
    for item in sorted(range(len(shares)), key=lambda i: -shares[i]):
        best = min((p for p in range(len(speeds)) if len(packs[p]) < room), key=lambda p: totals[p])
        packs[best].append(replicas[item])
        totals[best] += shares[item]
    return [i for pack in packs for i in pack]
""",
            "expert 0 has 4 replicas",
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
        "from the last slot on": Bad(
            """
def move(weights, old, new):
    for slot in reversed(range(len(new))):
        weights[slot] = weights[old.index(new[slot])]
""",
            "who still needed what was overwritten?",
        ),
        "always swaps": Bad(
            """
def move(weights, old, new):
    held = list(old)
    for slot, expert in enumerate(new):
        place = held.index(expert)
        spare = weights[slot].clone()
        weights[slot] = weights[place]
        weights[place] = spare
        held[slot], held[place] = held[place], held[slot]
""",
            "who still needed what was overwritten?",
        ),
        "all put aside": Bad(
            "def move(weights, old, new):\n    weights.copy_(weights[[old.index(i) for i in new]])",
            "there is memory for two",
        ),
        "no circles": Bad(
            [
                (
                    "        first = slot = next",
                    "        for slot, place in source.items():\n"
                    "            weights[slot] = weights[place]\n        return\n        first = slot = next",
                ),
            ],
            "old [0, 1], new [1, 0]",
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
            "def make_plan(loads, num_slots, speeds, most):\n"
            "    return rebalance_experts([loads], num_slots, 1, 1, len(speeds))[0][0].tolist()",
            "the library's own is switched off",
        ),
        "nothing replicated": Bad(
            "def make_plan(loads, num_slots, speeds, most):\n"
            "    return [*range(len(loads))] + [-1] * (num_slots - len(loads))",
            "slot(s) stay empty",
        ),
    },
    "eplb-3": {
        "from scratch": Bad("plan = scratch[0][0].tolist()", "12 slots hold another expert"),
    },
    "eplb-4": {
        "as it was": Bad(
            "def move(weights, old, new):\n    for slot, expert in enumerate(new):\n"
            "        weights[slot] = weights[old.index(expert)]",
            "who still needed what was overwritten?",
        ),
        "another tensor": Bad(
            "def move(weights, old, new):\n    weights = weights[[old.index(i) for i in new]]",
            "there is memory for two",
        ),
    },
}
