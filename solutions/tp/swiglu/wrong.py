"""Typical wrong answers and lazy cheats of the exercises on SwiGLU."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "held, kept, one_sum, two_sums = "

TYPICAL = {
    "swiglu-1": {
        "two weights": Bad(_PREDICT + "320, 216, 576, 1152", "are three"),
        "x cut": Bad(_PREDICT + "480, 144, 576, 1152", "keeps all of it"),
        "keeps the product": Bad(_PREDICT + "480, 276, 576, 1152", "computed again"),
    },
    "swiglu-3": {
        "cuts right, joins as before": Bad(
            [("    gates, ups = zip(*(part.chunk(2) for part in parts))\n", ""), ("[*gates, *ups]", "parts")],
            "the outputs are right, but the parts joined are rows [0, 2, 1, 3]",
        ),
        "every second row": Bad(
            [("half.chunk(num_ranks)[rank]", "half[rank::num_ranks]")],
            "those of neighbouring features, not of [0, 2, 4]",
        ),
        "all rows of gate": Bad([("half.chunk(num_ranks)[rank]", "half")], "2 features on 2 rank(s), rank 0: its part"),
    },
}

CHEATS = {
    "swiglu-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "held = kept = one_sum = two_sums = Anything()", "must be a whole number"
        ),
    },
    "swiglu-3": {
        "as it was": Bad(
            "def cut(gate_up, rank, num_ranks):\n    return gate_up.chunk(num_ranks)[rank]\n\n\n"
            "def join(parts):\n    return torch.cat(parts)",
            "row 0 is taken for gate here and row 1 for up",
        ),
    },
}
