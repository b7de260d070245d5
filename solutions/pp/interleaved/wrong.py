"""Typical wrong answers and lazy cheats of the exercises on interleaved 1F1B."""

from bad_answer import EQUAL_TO_ALL, Bad

_LIBRARY = "import dualpipe_lab as lab\nfrom dualpipe_lab import schedules\n"

TYPICAL = {
    "interleaved-1": {
        "1F1B": Bad([("234", "270")], "this is 1F1B"),
        "divided twice": Bad([("234", "222")], "divided by v twice"),
        "without the loop": Bad([("264", "72")], "without the loop"),
    },
    "interleaved-2": {
        "the rest in the first round": Bad(
            [("m // num_rounds + (index < m % num_rounds)", "min(p, m) + (index == 0) * max(0, m - num_rounds * p)")],
            "as equal as can be",
        ),
        "warm-up of 1F1B": Bad([("2 * (p - 1 - rank)", "(p - 1 - rank)")], "to leave messages time"),
        "breadth first": Bad([("(v - 1) * len(rounds[0]) + 2 * (p - 1 - rank)", "m * v")], "are enough"),
    },
}

CHEATS = {
    "interleaved-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "makespan = peak = messages = makespan_of_two = Anything()", "whole number"
        )
    },
    "interleaved-2": {
        "the library's own": Bad(
            _LIBRARY + "def loop_rows(p, m, v):\n    return schedules.interleaved(p, m, v).rows()", "switched off"
        ),
    },
}
