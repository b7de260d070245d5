"""Typical wrong answers and lazy cheats of the exercises on the LM head."""

from bad_answer import EQUAL_TO_ALL, Bad

_NAMES = "held, sent_for_dx, sent_for_loss = "

TYPICAL = {
    "lm_head-1": {
        "all logits": Bad(_NAMES + "1_966_080_000, 117_440_512, 172_032", "one rank alone would hold"),
        "one way": Bad(_NAMES + "245_760_000, 58_720_256, 86_016", "each byte passes a rank twice"),
        "no maximum": Bad(_NAMES + "245_760_000, 117_440_512, 114_688", "the maximum is the third"),
    },
    "lm_head-2": {
        "low enough for small logits": Bad([("-torch.inf", "-30.0")], "logits near -400: rank 0: the loss differs"),
        "own columns counted from 0": Bad([("first + torch.arange", "torch.arange")], "rank 0: the loss differs"),
        "no sum of dx": Bad([("copy_to_ranks(x)", "x")], "rank 0: the gradient of x differs"),
    },
}

CHEATS = {
    "lm_head-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "held = sent_for_dx = sent_for_loss = Anything()", "must be a whole number"
        ),
    },
    "lm_head-2": {
        "the loss alone": Bad(
            [("    return cross_entropy(", "    logits = logits.detach().requires_grad_()\n    return cross_entropy(")],
            "the gradient of x is missing",
        ),
    },
}
