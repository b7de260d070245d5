"""Typical wrong answers and lazy cheats of the exercises on where the time goes."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "gflop, at_best, at_40, mfu, tokens, microbatches = "

TYPICAL = {
    "speed-1": {
        "all parameters": Bad(_PREDICT + "180, 5_000, 12_500, 75, 20_000, 28", "3 billion of the 30"),
        "one GPU": Bad(_PREDICT + "18, 36_000, 1_250, 75, 200_000, 28", "share the work"),
        "multiplied": Bad(_PREDICT + "18, 500, 200, 75, 200_000, 28", "makes a step longer"),
        "never waits": Bad(_PREDICT + "18, 500, 1_250, 100, 200_000, 28", "does not count the second forward"),
        "cancelled": Bad(_PREDICT + "18, 500, 1_250, 75, 20_000, 28", "all 30 billion gradients"),
        "idle of the work": Bad(_PREDICT + "18, 500, 1_250, 75, 200_000, 35", "of the whole time"),
    },
    "speed-2": {
        "dp forgotten": Bad([("run.dp * run.sequences", "run.sequences")], "sequences of its own"),
        "mask forgotten": Bad([(" / (2 if run.causal else 1)", "")], "hides half of the pairs"),
        "tied forgotten": Bad([("run.parameters if run.tied else ", "")], "the head multiplies"),
        "a lookup multiplies": Bad([("if run.tied else run.parameters - run.table", "")], "looked up"),
        "GPUs of dp": Bad([("run.dp * run.tp * run.pp", "run.dp")], "GPUs are those of all axes"),
        "one share": Bad([("return useful, ", "return ")], "return two shares"),
        "MFU recomputed": Bad(
            [("return useful, useful * 4 / 3 if run.recompute else useful", "return useful, useful")],
            "a second forward",
        ),
        "dp on both sides twice": Bad([("run.dp * run.sequences", "run.dp**2 * run.sequences")], "more than one thing"),
    },
    "speed-3": {
        "even layers": Bad("stages = [8, 8, 8, 8]", "legal: "),
        "no pipeline": Bad("stages = [32]", "legal: "),
        "two stages": Bad("stages = [17, 15]", "the sum stands bare"),
        "eight stages": Bad("stages = [5, 5, 4, 4, 4, 4, 4, 2]", "legal: "),
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
        "empty": Bad("stages = []", "0 layers together"),
        "negative": Bad("stages = [40, -8]", "at least one layer each"),
    },
}
