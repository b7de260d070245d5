"""Typical wrong answers and lazy cheats of the exercises on where the time goes."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "gflop, at_best, at_40, mfu, tokens, microbatches = "

TYPICAL = {
    "speed-1": {
        "all parameters": Bad(_PREDICT + "180, 5_000, 12_500, 75, 20_000, 28", "3 billion of the 30"),
        "one GPU": Bad(_PREDICT + "18, 36_000, 1_250, 75, 200_000, 28", "share the work"),
        "multiplied": Bad(_PREDICT + "18, 500, 200, 75, 200_000, 28", "makes a step longer"),
    },
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
    "speed-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "gflop = at_best = at_40 = mfu = tokens = microbatches = Anything()",
            "must be a whole number",
        ),
    },
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
