"""Typical wrong answers and lazy cheats of the exercises on experts that move."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "changed, travelling, training_mib, serving_mib, for_last = "

TYPICAL = {
    "moving_experts-1": {
        "only those that travel": Bad(_PREDICT + "3, 3, 63, 9, 3", "two slots of rank 3"),
        "all that change travel": Bad(_PREDICT + "5, 5, 105, 15, 3", "from each other"),
        "no master copy": Bad(_PREDICT + "5, 3, 45, 9, 3", "master copy"),
        "the first replica first": Bad(_PREDICT + "5, 3, 63, 9, 2", "begins with the last replica"),
    },
    "moving_experts-2": {
        "far ones as well": Bad([("own or near or slots[expert]", "slots[expert]")], "is far away"),
        "own rank forgotten": Bad([("own or near or slots[expert]", "near or slots[expert]")], "on this rank"),
        "every rank from 0": Bad([("(rank + turns[expert])", "turns[expert]")], "it is the turn of"),
        "one counter for all": Bad([("turns[expert] += 1", "turns = [n + 1 for n in turns]")], "it is the turn of"),
        "a node for each slot": Bad([("home[slot] // ranks_per_node ==", "slot // ranks_per_node ==")], "is far away"),
    },
    "moving_experts-3": {
        "every replica": Bad([("if table.index(table[slot]) == slot:", "if True:")], "who counts?"),
        "only without replicas": Bad(
            [("if table.index(table[slot]) == slot:", "if table.count(table[slot]) == 1:")], "an expert is left out"
        ),
        "the highest on this rank": Bad(
            [("if table.index(table[slot]) == slot:", "if table[slot] not in table[slot + 1 : (rank + 1) * size]:")],
            "who counts?",
        ),
    },
}

CHEATS = {
    "moving_experts-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "changed = travelling = training_mib = serving_mib = for_last = Anything()",
            "must be a whole number",
        ),
    },
    "moving_experts-2": {
        "the first slot": Bad(
            "def slots_of(chosen, slots, rank, slots_per_rank, ranks_per_node):\n"
            "    return [slots[expert][0] for expert in chosen]",
            "it is the turn of",
        ),
    },
    "moving_experts-3": {
        "as it was": Bad(
            "def squared(rows, table, rank):\n    size, total = len(rows), 0.0\n"
            "    for row, slot in zip(rows, range(rank * size, (rank + 1) * size)):\n"
            "        if table[slot] not in table[rank * size : slot]:\n"
            "            total += sum(number**2 for number in row)\n    return total",
            "who counts?",
        ),
    },
}
