"""Typical wrong answers and lazy cheats of the exercises on what the network does to each axis."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "bubble, equal, equal_with_8 = "
_PLACE = "def place(plan, config, batch_size, sequence_length, ranks_per_node):\n    "

TYPICAL = {
    "placing-1": {
        "a fraction of the longer step": Bad(_PREDICT + "24, 20, 32", "fraction of the longer step"),
        "all eight messages": Bad(_PREDICT + "30, 15, 32", "4 of its 8 messages"),
        "the same bubble": Bad(_PREDICT + "30, 16, 16", "the bubble is shorter"),
    },
    "placing-2": {
        "the plan as it is": Bad(_PLACE + "return list(plan.order)", "sends"),
        "always tp inside": Bad(_PLACE + 'return ["pp", "cp", "dp", "ep", "tp"]', "4 sequences of 4 tokens"),
    },
}

CHEATS = {
    "placing-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "bubble = equal = equal_with_8 = Anything()", "must be a whole number"
        ),
    },
    "placing-2": {
        "no axis at all": Bad(_PLACE + "return []", "each of"),
        "a plan that sends nothing": Bad(_PLACE + "return replace(plan, dp=1)", "which is no data"),
    },
}
