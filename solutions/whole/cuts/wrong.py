"""Typical wrong answers and lazy cheats of the exercises on one model on every cut."""

from bad_answer import EQUAL_TO_ALL, Bad

ONE, TWO, THREE, FOUR = (f"cuts-{number}" for number in range(1, 5))
NUMBERS = "ranks, sequences, tokens, layers = "

TYPICAL = {
    ONE: {
        "forgets dp": Bad(NUMBERS + "32, 4, 256, 4", "among the data ranks first"),
        "forgets cp": Bad(NUMBERS + "32, 2, 256, 4", "half of the tokens"),
        "one stage": Bad(NUMBERS + "32, 2, 128, 2", "under DualPipe a rank has two"),
    },
    TWO: {
        "stages without layers": Bad([(" or pp > num_layers", "")], "is not legal"),
        "KV heads never shared": Bad(
            [("(num_kv_heads % tp and tp % num_kv_heads)", "num_kv_heads % tp")], "is missing"
        ),
        "rounds down": Bad([("-(-num_layers // pp)", "num_layers // pp")], "the fullest stage"),
    },
    FOUR: {
        "the last axis is dp": Bad([("rank // stride % size", "rank % size")], "are one data rank"),
        "from the left": Bad([("reversed(axes)", "axes")], "are one data rank"),
        "cp forgotten": Bad([('place["dp"], place["cp"]', 'place["dp"], 0')], "it reads positions"),
    },
}

CHEATS = {
    ONE: {"equal to everything": Bad(EQUAL_TO_ALL + NUMBERS + "[Anything()] * 4", "whole number")},
    TWO: {
        "nothing": Bad("def legal_sizes(*args):\n    return []", "is missing"),
    },
    FOUR: {
        "everything everywhere": Bad(
            """
def share(rank, axes, batch, num_microbatches, length):
    return [list(range(batch))], list(range(length))
""",
            "reads sequences",
        )
    },
}
