"""Typical wrong answers and lazy cheats of the exercises on axes and links."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "along_tp, along_dp, along_pp, cut_tokens, pp_outside, dp_outside = "

TYPICAL = {
    "links-1": {
        "all layers": Bad(_PREDICT + "768, 6, 16, 240, 384, 320", "4 of the 16 layers"),
        "whole matrices": Bad(_PREDICT + "192, 24, 16, 240, 384, 320", "tp cuts the gradients"),
        "one direction": Bad(_PREDICT + "192, 6, 8, 240, 384, 320", "two neighbours"),
    },
}

CHEATS = {
    "links-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "along_tp = along_dp = along_pp = cut_tokens = pp_outside = dp_outside = Anything()",
            "must be a whole number",
        ),
    },
}
