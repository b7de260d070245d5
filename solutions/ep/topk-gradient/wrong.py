"""Typical wrong answers and lazy cheats of the exercises on the gradient of a choice."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "as_they_are, normalised, single, weight_bytes, balance_bytes = "
_ROUTE = "def route(logits, k):\n    scores, indices = logits.softmax(-1).topk(k)\n    return indices, "

TYPICAL = {
    "topk_gradient-1": {
        "chosen alone": Bad(_PREDICT + "12, 12, 0, 768, 108", "also of those that were not asked"),
        "nothing cancels": Bad(_PREDICT + "48, 48, 0, 768, 108", "has cancelled"),
        "one expert learns": Bad(_PREDICT + "48, 12, 6, 768, 108", "whatever p is"),
    },
    "topk_gradient-4": {
        "never normalised": Bad([("normalise=k > 1", "normalise=False")], "k = 2: weight 0 of token 0"),
        "normalised for two": Bad([("normalise=k > 1", "normalise=k == 2")], "5 experts, k = 3: weight 0"),
        "detached": Bad(
            _ROUTE + "scores / scores.sum(-1, keepdim=True).detach()",
            "k = 1: weight 0 of token 0 is 1",
        ),
    },
}

CHEATS = {
    "topk_gradient-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "as_they_are = normalised = single = weight_bytes = balance_bytes = Anything()",
            "must be a whole number",
        ),
    },
    "topk_gradient-4": {
        "as it was": Bad([("normalise=k > 1", "normalise=True")], "nothing can be learned"),
    },
}
