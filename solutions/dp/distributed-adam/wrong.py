"""Typical wrong answers and lazy cheats of the exercises on distributed Adam."""

from bad_answer import EQUAL_TO_ALL, Bad

TYPICAL = {
    "distributed_adam-1": {
        "no padding": Bad("state_bytes, norm, clipped = 2664, 7, 3", "round up"),
        "sum of norms": Bad("state_bytes, norm, clipped = 2672, 11, 3", "norms do not add up"),
        "the shard by itself": Bad("state_bytes, norm, clipped = 2672, 7, 4", "this shard is a part of it"),
    },
    "distributed_adam-3": {
        "own norm": Bad([("    comm.all_reduce(square)\n", "")], "that is the norm of one rank's part"),
        "replicated on all": Bad(
            [
                ("in shards:\n        square", "in [*shards, *replicated]:\n        square"),
                ("    for tensor in replicated:\n        square += tensor.square().sum()\n", ""),
            ],
            "it counts once",
        ),
        "always scaled": Bad(
            [("min(1.0, max_norm / (norm + 1e-6))", "max_norm / (norm + 1e-6)")], "after clipping, expected"
        ),
    },
}

CHEATS = {
    "distributed_adam-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "state_bytes = norm = clipped = Anything()", "must be a whole number"
        ),
    },
    "distributed_adam-3": {
        "a constant": Bad("def clip(shards, replicated, max_norm):\n    return 20**0.5", "it is 2"),
    },
}
