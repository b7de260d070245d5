"""Typical wrong answers and lazy cheats of the exercises on weights from elsewhere."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "first, of_keys, places, of_down, of_all = "

TYPICAL = {
    "weights-1": {
        "half a head": Bad(_PREDICT + "320, 262144, 2048, 3145728, 2097152", "half a head"),
        "the head, not its row": Bad(_PREDICT + "2, 524288, 2048, 3145728, 4194304", "each has 128 rows"),
        "one place": Bad(_PREDICT + "256, 524288, 1, 3145728, 4194304", "row by row"),
    },
    "weights-2": {
        "heads in turn": Bad(
            [("first, behind = start // group", "first = rank % num_kv_heads\n    behind = first + 1 #")],
            "is missing; the key heads are rows",
        ),
        "as many KV heads on every rank": Bad(
            [("(stop - 1) // group + 1", "start // group + max(1, num_kv_heads // num_ranks)")],
            "rank 0 of 2, 12 query and 3 KV head(s) of 1 rows: row 13 is missing",
        ),
        "values behind the queries": Bad(
            [("(num_heads, num_heads + num_kv_heads)", "(num_heads + num_kv_heads, num_heads)")],
            "in the order query, key, value",
        ),
    },
    "weights-3": {
        "o as it is": Bad([('state[f"{old}out"].T', 'state[f"{old}out"]')], "o_proj.weight: the numbers are those of"),
        "all queries first": Bad(
            [
                ('heads = state[f"{old}qkv"].unflatten(0, (num_kv_heads, -1, size))', 'heads = state[f"{old}qkv"]'),
                (
                    "heads.split([num_heads // num_kv_heads, 1, 1], 1)",
                    "(part[None, None] for part in heads.split([size * n for n in (num_heads, num_kv_heads, "
                    "num_kv_heads)]))",
                ),
            ],
            "as if all query heads came first",
        ),
        "up, then gate": Bad([("gate, up = ", "up, gate = ")], "gate and up are exchanged"),
    },
    "weights-4": {
        "only the heads of k": Bad([("(heads, -1, 2)", "(heads, 2, -1)")], "from halves to neighbours"),
        "only the order": Bad([("reordered(k, num_kv_heads)", "reordered(k, num_heads)")], "k has fewer heads than q"),
        "k forgotten": Bad([("reordered(k, num_kv_heads)", "k")], "k: the rows are as they came"),
    },
}

CHEATS = {
    "weights-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "first = of_keys = places = of_down = of_all = Anything()", "must be a whole number"
        ),
    },
    "weights-2": {
        "everything": Bad(
            "def rows_of(rank, num_ranks, num_heads, num_kv_heads, head_size):\n"
            "    return [(0, (num_heads + 2 * num_kv_heads) * head_size)]",
            "belongs to a head that this rank does not use",
        ),
    },
    "weights-3": {
        "nothing": Bad("def renamed(state, num_heads, num_kv_heads):\n    return {}", "is missing"),
    },
    "weights-4": {
        "as they came": Bad(
            "def to_halves(q, k, num_heads, num_kv_heads):\n    return q, k", "q: the rows are as they came"
        ),
    },
}
