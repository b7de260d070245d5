"""Right answers of another style to the exercises on hybrid ZeRO."""

RIGHT = {
    "hybrid_zero-4": {
        "whole floats": 'stage, shard_ranks, num_microbatches = "zero2", 32 / 4, 16 / 4',
        "searched": """
best = []
for s in ("zero1", "zero2", "zero3"):
    for k in (1, 2, 4, 8, 16, 32):
        for m in (1, 2, 4, 8):
            held = {"zero1": 4 + 12 / k, "zero2": 2 + 14 / k, "zero3": 16 / k}[s] * 4 + 16 // m * 1.5
            units = {"zero1": 2, "zero2": m + 1, "zero3": 3 * m}[s]
            sent = units * 8 * (k - 1) / k / (200 if k <= 8 else 25) + 2 * 8 / k * (32 // k - 1) / (32 // k) / 25
            if held <= 24:
                best.append((sent, s, k, m))
_, stage, shard_ranks, num_microbatches = min(best)
""",
    },
}  # fmt: skip
