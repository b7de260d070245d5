"""Typical wrong answers and lazy cheats of the exercises on cross-entropy."""

from bad_answer import EQUAL_TO_ALL, Bad

TYPICAL = {
    "cross_entropy-1": {
        "one way": Bad(
            "loss_bytes, gather_bytes, smoothed_bytes = 43_008, 860_160_000, 57_344", "each byte passes a rank twice"
        ),
        "forgets the maximum": Bad(
            "loss_bytes, gather_bytes, smoothed_bytes = 57_344, 860_160_000, 86_016", "the maximum is the third"
        ),
        "own part too": Bad(
            "loss_bytes, gather_bytes, smoothed_bytes = 86_016, 983_040_000, 114_688", "own eighth does not travel"
        ),
    },
    "cross_entropy-2": {
        "empty part": Bad(
            [(" if y.shape[1] else y.new_full((len(y),), -torch.inf)", "")], "4 entries on 3 rank(s): rank 2 raised"
        ),
        "0 by 0": Bad([("max(int(valid.sum()), 1)", "valid.sum()")], "rank 0: the loss for no target but -100 is not"),
        "divides by all tokens": Bad([("max(int(valid.sum()), 1)", "len(y)")], "rank 0: the loss for targets of -100"),
    },
}

CHEATS = {
    "cross_entropy-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "loss_bytes = gather_bytes = smoothed_bytes = Anything()", "must be a whole number"
        ),
    },
    "cross_entropy-2": {
        "the library's function": Bad(
            """
def loss_and_gradient(y, targets, first):
    from dualpipe_lab import tp
    loss = tp.cross_entropy(y.requires_grad_(), targets, 4)
    loss.backward()
    return loss.detach(), y.grad
""",
            "the library's own is switched off",
        ),
    },
}
