"""Typical wrong answers and lazy cheats of the exercises on weights from elsewhere."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "first, of_keys, places, of_down, of_all = "

TYPICAL = {
    "weights-1": {
        "half a head": Bad(_PREDICT + "320, 262144, 2048, 3145728, 2097152", "half a head"),
        "the head, not its row": Bad(_PREDICT + "2, 524288, 2048, 3145728, 4194304", "each has 128 rows"),
        "one place": Bad(_PREDICT + "256, 524288, 1, 3145728, 4194304", "row by row"),
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
    "weights-4": {
        "as they came": Bad(
            "def to_halves(q, k, num_heads, num_kv_heads):\n    return q, k", "q: the rows are as they came"
        ),
    },
}
