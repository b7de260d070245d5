"""Right answers of another style to the exercises on planning a run."""

RIGHT = {
    "plan_your_run-2": {
        "the best so far": """
def fastest(model, plans, cluster, sequence_length, global_batch):
    best, least = None, float("inf")
    room = cluster.accelerator.memory_bytes
    for place, plan in enumerate(plans):
        try:
            memory = estimate(model, plan, cluster, sequence_length, global_batch, rules=MEGATRON)
            time = step_time(model, plan, cluster, sequence_length, global_batch, rules=MEGATRON_TIME)
        except ValueError:
            continue
        if all(rank.total.num_bytes <= room for rank in memory.ranks) and time.seconds < least:
            best, least = place, time.seconds
    return best
""",
        "in the order of time": """
def fastest(model, plans, cluster, sequence_length, global_batch):
    def is_legal(plan):
        try:
            estimate(model, plan, cluster, sequence_length, global_batch)
        except ValueError:
            return False
        return True

    def seconds(plan):
        return step_time(model, plan, cluster, sequence_length, global_batch, MEGATRON_TIME).seconds

    for plan in sorted(filter(is_legal, plans), key=seconds):
        if estimate(model, plan, cluster, sequence_length, global_batch, MEGATRON).fits:
            return plans.index(plan)
""",
    },
    "plan_your_run-3": {
        "zero bubble": """
plan = lab.Plan(pp=2, dp=2, cp=4, zero=1, num_microbatches=32, schedule="zero_bubble_h1", precision="bfloat16")
""",
        "a shorter ring": """
plan = lab.Plan(pp=2, dp=4, cp=2, zero=2, num_microbatches=16, precision="bfloat16")
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
