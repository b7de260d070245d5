"""Right answers of another style to the exercises on planning a run."""

RIGHT = {
    "plan_your_run-2": {
        "in the order of time": """
def best(model, plans, sequence_length, global_batch, memory_bytes):
    legal = {}
    for place, plan in enumerate(plans):
        try:
            legal[place] = memory(model, plan, sequence_length, global_batch)
        except ValueError:
            pass
    times = {
        place: estimate(model, plans[place], sequence_length, global_batch).point
        for place, found in legal.items()
        if all(rank.total <= memory_bytes for rank in found.ranks)
    }
    order = sorted(times, key=times.get)
    chosen = None
    for place in order:
        axes = [name for name, size in plans[place].sizes.items() if size > 1]
        if times[place] <= times[order[0]] * 1.05 and (chosen is None or len(axes) < chosen[0]):
            chosen = len(axes), place
    return None if chosen is None else chosen[1]
""",
        "the last of the simplest": """
def best(model, plans, sequence_length, global_batch, memory_bytes):
    found = []
    for place, plan in enumerate(plans):
        try:
            largest = memory(model, plan, sequence_length, global_batch).largest.total
            seconds = estimate(model, plan, sequence_length, global_batch).parts
        except ValueError:
            continue
        if largest <= memory_bytes:
            found.append((sum(seconds.values()), sum(n > 1 for n in (plan.pp, plan.dp, plan.cp, plan.tp)), place))
    if found:
        fastest = min(found)[0]
        return min((axes, -place) for seconds, axes, place in found if seconds / fastest <= 1.05)[1] * -1
""",
    },
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
