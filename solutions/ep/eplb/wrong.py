"""Typical wrong answers and lazy cheats of the exercises on balancing experts."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "replicas, heaviest, moved_mib, summed_mib = "

TYPICAL = {
    "eplb-1": {
        "by raw load": Bad(_PREDICT + "3, 15, 9, 6", "still the heaviest share"),
        "packs by raw load": Bad(_PREDICT + "2, 15, 9, 6", "three replicas"),
        "the lighter rank": Bad(_PREDICT + "2, 13, 9, 6", "the heavier one"),
    },
    "eplb-2": {
        "no limit of replicas": Bad([("if n < most]", "if n < 99]")], "expert 0 has"),
        "one speed": Bad([("(totals[r] + shares[expert]) / speeds[r]", "totals[r]")], "the replicas are right"),
        "drops the idle": Bad([("in sorted(replicas,", "in sorted([i for i in replicas if loads[i]],")], "has no slot"),
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
            "from dualpipe_lab.ep.eplb import rebalance_experts\n"
            "def make_plan(loads, num_slots, speeds, most):\n"
            "    return rebalance_experts([loads], num_slots, 1, 1, len(speeds))[0][0].tolist()",
            "the library's own is switched off",
        ),
    },
}
