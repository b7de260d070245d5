"""Typical wrong answers and lazy cheats of the exercises on DualPipe's overlap."""

from bad_answer import EQUAL_TO_ALL, Bad

NAMES = "serial, forward_first, backward_first, split_alone"

TYPICAL = {
    "dualpipe_overlap-1": {
        "work alone": Bad(f"{NAMES} = 54, 66, 68, 42", "each of the six all-reduces"),
        "the last travel only": Bad(f"{NAMES} = 102, 62, 68, 42", "shorter than the 8 ms"),
        "no order on the link": Bad(f"{NAMES} = 102, 66, 66, 42", "while the backward's is under way"),
    },
    "dualpipe_overlap-2": {
        "waits at once": Bad(
            [
                (
                    "        layer.weight_grad()\n        yield\n        work.wait()\n",
                    "        work.wait()\n        layer.weight_grad()\n        yield\n",
                )
            ],
            "a travel begins after I",
        ),
        "one half after the other": Bad(
            [("last[place] = next(half)", "*_, last[place] = half\n                running.remove((place, half))")],
            "a half goes on while",
        ),
        "ends with the shorter half": Bad(
            [("running.remove((place, half))", "running.clear()")], "1 layer(s) forward, 3 backward"
        ),
    },
}

CHEATS = {
    "dualpipe_overlap-1": {"equal to everything": Bad(EQUAL_TO_ALL + f"{NAMES} = [Anything()] * 4", "whole number")},
    "dualpipe_overlap-2": {
        "W left out": Bad([("        layer.weight_grad()\n", "")], "the weights' gradients is missing"),
    },
}
