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
        "W before the launch": Bad(
            [
                ("        layer.weight_grad()\n", ""),
                (
                    "        total = layer.input_grad(dy)\n",
                    "        total = layer.input_grad(dy)\n        layer.weight_grad()\n",
                ),
            ],
            "a travel begins after I",
        ),
        "without the residual": Bad([("dy = dy + total", "dy = total")], "the gradient of the input"),
        "one half after the other": Bad(
            [("last[place] = next(half)", "*_, last[place] = half\n                running.remove((place, half))")],
            "a half goes on while",
        ),
    },
}

CHEATS = {
    "dualpipe_overlap-1": {"equal to everything": Bad(EQUAL_TO_ALL + f"{NAMES} = [Anything()] * 4", "whole number")},
    "dualpipe_overlap-2": {
        "W left out": Bad([("        layer.weight_grad()\n", "")], "the weights' gradients is missing"),
    },
}
