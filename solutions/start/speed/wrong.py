"""Typical wrong answers and lazy cheats of the exercises on where the time goes."""

from bad_answer import Bad

TYPICAL = {
    "speed-2": {
        "dp forgotten": Bad([("run.dp * run.sequences", "run.sequences")], "sequences of its own"),
        "mask forgotten": Bad([(" / (2 if run.causal else 1)", "")], "hides half of the pairs"),
        "tied forgotten": Bad([("run.parameters if run.tied else ", "")], "the head multiplies"),
    },
}

CHEATS = {
    "speed-2": {
        "the four logs by heart": Bad(
            "def utilization(run):\n"
            "    share = {0.33: 0.335, 0.35: 0.3159, 1.0: 0.4079, 0.4: 0.3415}[run.seconds]\n"
            "    return share, share",
            "expected 33.50%",
        ),
    },
}
