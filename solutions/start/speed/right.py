"""Right answers of another style to the exercises on where the time goes."""

RIGHT = {
    "speed-2": {
        "FLOPs of a step": """
def utilization(run):
    pairs = run.length**2 / 2 if run.causal else run.length**2
    matrices = run.parameters - (0 if run.tied else run.table)
    of_a_sequence = 6 * matrices * run.length + 12 * run.layers * pairs * run.hidden
    seconds = of_a_sequence * run.sequences / (run.tp * run.pp) / PEAK
    mfu = seconds / run.seconds
    return [mfu, (1 + run.recompute / 3) * mfu]
""",
        "forwards and backwards": """
def utilization(run):
    forward = 2 * run.parameters + 4 * run.layers * run.length * run.hidden * (0.5 if run.causal else 1)
    if not run.tied:
        forward -= 2 * run.table
    everything = run.seconds * PEAK * run.dp * run.tp * run.pp / (run.dp * run.sequences * run.length)
    return 3 * forward / everything, (3 + int(run.recompute)) * forward / everything
""",
    },
    "speed-3": {
        "two more on the second": "stages = (8, 9, 8, 7)",
        "by a loop": """
def best():
    found = []
    for first in range(1, 30):
        for second in range(1, 31 - first):
            for third in range(1, 32 - first - second):
                work = [first, second, third, 34 - first - second - third]
                held = [first + 2, *work[1:]]
                bare = max(70 * g * 15 / 16 - 18 * w for g, w in zip(held, work))
                found.append((11 * 27 * max(work) + bare, [*work[:3], work[3] - 2]))
    return min(pair for pair in found if min(pair[1]) > 0)[1]

stages = best()
""",
    },
}
