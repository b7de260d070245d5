"""Typical wrong answers and lazy cheats of the exercises on where the memory goes."""

from bad_answer import Bad

TYPICAL = {
    "memory-4": {
        "rounded down": Bad([("-(-numel // num_shared)", "numel // num_shared")], "a shard is rounded up"),
        "ZeRO-3": Bad([("2 * numel + 2 * shard", "4 * shard")], "the moments alone are sharded"),
        "one microbatch": Bad([("num_live * saved_bytes", "saved_bytes")], "belong to live microbatches"),
    },
}  # fmt: skip

CHEATS = {
    "memory-4": {
        "the course's own": Bad(
            "from dualpipe_ours.memory import rank_bytes\nrank_bytes = rank_bytes", "is the course's own"
        ),
    },
}
