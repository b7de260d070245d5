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
}
