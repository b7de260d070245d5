"""Typical wrong answers and lazy cheats of the exercises on where the memory goes."""

from bad_answer import Bad

TYPICAL = {
    "memory-4": {
        "rounded down": Bad([("-(-numel // num_shared)", "numel // num_shared")], "a shard is rounded up"),
        "ZeRO-3": Bad([("2 * numel + 2 * shard", "4 * shard")], "the moments alone are sharded"),
        "one microbatch": Bad([("num_live * saved_bytes", "saved_bytes")], "belong to live microbatches"),
    },
    "memory-3": {
        "even stages": Bad(
            'plan = {"tp": 2, "layers": [9] * 8 + [8], "dp": 1, "zero": 0, "recompute": True}', "stage 0 holds"
        ),
        "ZeRO-3": Bad(
            'plan = {"tp": 2, "layers": [80], "dp": 10, "zero": 3, "recompute": True}', "legal: 20 GPUs"
        ),
        "ZeRO-3 in a pipeline": Bad(
            'plan = {"tp": 1, "layers": [40, 40], "dp": 8, "zero": 3, "recompute": True}', "not allowed"
        ),
    },
}  # fmt: skip

CHEATS = {
    "memory-4": {
        "the course's own": Bad(
            "from dualpipe_ours.memory import rank_bytes\nrank_bytes = rank_bytes", "is the course's own"
        ),
    },
    "memory-3": {
        "no layers": Bad('plan = {"tp": 1, "layers": [], "dp": 1, "zero": 0, "recompute": True}', "at least one"),
    },
}
