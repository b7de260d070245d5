"""Typical wrong answers and lazy cheats of the exercises on where the time goes."""

from bad_answer import Bad

TYPICAL = {
    "speed-2": {
        "dp forgotten": Bad([("run.dp * run.sequences", "run.sequences")], "sequences of its own"),
        "mask forgotten": Bad([(" / (2 if run.causal else 1)", "")], "hides half of the pairs"),
        "tied forgotten": Bad([("run.parameters if run.tied else ", "")], "the head multiplies"),
    },
    "speed-3": {
        "even layers": Bad("stages = [8, 8, 8, 8]", "legal: "),
        "two stages": Bad("stages = [17, 15]", "the sum stands bare"),
        "five stages": Bad("stages = [7, 7, 7, 7, 4]", "do not divide"),
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
    "speed-3": {
        "few layers": Bad("stages = [1, 1, 1, 1]", "4 layers together"),
    },
}
