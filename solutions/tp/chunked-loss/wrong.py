"""Typical wrong answers and lazy cheats of the exercises on a loss without logits."""

from bad_answer import EQUAL_TO_ALL, Bad

_NAMES = "held, collectives, operations = "

TYPICAL = {
    "chunked_loss-1": {
        "all chunks": Bad(_NAMES + "1_048_576_000, 3, 17_179_869_184_000", "the logits of all 32 chunks"),
        "collectives in each chunk": Bad(_NAMES + "32_768_000, 96, 17_179_869_184_000", "the chunks send nothing"),
        "the plain head's products": Bad(_NAMES + "32_768_000, 3, 12_884_901_888_000", "the logits once more"),
    },
    "chunked_loss-3": {
        "as it was": Bad([("dz /= n", "dz /= valid.sum()")], "10 targets of 10 tokens, chunks of 5"),
        "all tokens": Bad([("(targets != -100).sum()", "torch.tensor(len(x))")], "5 targets of 10 tokens"),
        "no target at all": Bad([(".clamp(min=1)", "")], "0 targets of 10 tokens"),
    },
}

CHEATS = {
    "chunked_loss-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "held = collectives = operations = Anything()", "must be a whole number"
        ),
    },
    "chunked_loss-3": {
        "autograd": Bad(
            "def gradients(x, weight, targets, first, chunk, M, L):\n"
            "    x.requires_grad_(), weight.requires_grad_()\n"
            "    loss = torch.nn.functional.cross_entropy(x @ weight.t(), targets)\n"
            "    loss.backward()\n"
            "    return x.grad, weight.grad",
            "switched off",
        ),
    },
}
