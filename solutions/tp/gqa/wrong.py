"""Typical wrong answers and lazy cheats of the exercises on grouped-query attention."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "key_head, held, cached, for_copies = "

TYPICAL = {
    "gqa-1": {
        "dealt out in turn": Bad(_PREDICT + "0, 1280, 128, 5120", "neighbours share"),
        "half a head": Bad(_PREDICT + "1, 640, 128, 5120", "never half of one"),
        "nothing to sum": Bad(_PREDICT + "1, 1280, 128, 0", "another rank holds the same"),
    },
    "gqa-2": {
        "dealt out in turn": Bad(
            [("range(rank * size, (rank + 1) * size)", "range(rank, num_heads, num_ranks)")],
            "rank 0 of 2, 4 query heads and 1 KV head(s): query heads [0, 2]",
        ),
        "KV head modulo": Bad(
            [("range(queries[0] // group, queries[-1] // group + 1)", "sorted({i % num_kv_heads for i in queries})")],
            "while query heads [0, 1] read 1",
        ),
        "always alone": Bad([("max(num_ranks // num_kv_heads, 1)", "1")], "rank 1 reads the same KV heads"),
    },
}

CHEATS = {
    "gqa-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "key_head = held = cached = for_copies = Anything()", "must be a whole number"
        ),
    },
    "gqa-2": {
        "everything everywhere": Bad(
            "def heads_of(rank, num_ranks, num_heads, num_kv_heads):\n"
            "    return range(num_heads), range(num_kv_heads), range(num_ranks)",
            "rank 0 of 2, 2 query heads and 1 KV head(s): query heads [0, 1]",
        ),
    },
}
