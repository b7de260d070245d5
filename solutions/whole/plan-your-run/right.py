"""Right answers of another style to the exercises on planning a run."""

RIGHT = {
    "plan_your_run-3": {
        "zero bubble": """
plan = lab.Plan(pp=2, dp=2, cp=4, zero=1, num_microbatches=32, schedule="zero_bubble_h1", precision="bfloat16")
""",
        "tp inside": """
plan = lab.Plan(
    pp=2, dp=4, tp=2, zero=1, num_microbatches=16, schedule="zero_bubble_h1", sequence_parallel=True,
    precision="bfloat16",
)
""",
    },
    "plan_your_run-4": {
        "one expression": """
def peaks(weights, layers, num_microbatches, layer_bytes, logit_bytes):
    last = len(weights) - 1
    return [
        18 * w + min(last - r + 1, num_microbatches) * n * layer_bytes + (logit_bytes if r == last else 0)
        for r, (w, n) in enumerate(zip(weights, layers))
    ]
""",
        "from the last rank": """
def peaks(weights, layers, num_microbatches, layer_bytes, logit_bytes):
    found, extra = [], logit_bytes
    for behind, (w, n) in enumerate(zip(reversed(weights), reversed(layers)), 1):
        found.insert(0, 18 * w + min(behind, num_microbatches) * n * layer_bytes + extra)
        extra = 0
    return found
""",
    },
}
