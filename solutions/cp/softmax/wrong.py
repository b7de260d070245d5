"""Typical wrong answers and lazy cheats of the exercises on the softmax."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "gradients, forward_bytes, backward_bytes = "
_LIBRARY = "    from dualpipe_lab.cp.softmax import softmax, softmax_backward\n"

TYPICAL = {
    "softmax-1": {
        "y dy": Bad(_PREDICT + "[16, 4, 0], 12_000, 6_000", "is subtracted first"),
        "diagonal": Bad(_PREDICT + "[8, 3, 0], 12_000, 6_000", "the diagonal of the matrix alone"),
        "nothing back": Bad(_PREDICT + "[6, -1, -5], 12_000, 0", "so over all ranks"),
    },
    "softmax-2": {
        "no guard": Bad(
            [("largest.masked_fill(largest == -torch.inf, 0)", "largest")], "a row that is hidden: the weights"
        ),
        "zero times infinity": Bad(
            [("x.masked_fill(x == -torch.inf, 0)", "x")],
            "hidden scores: the gradient of the temperature: number 0 is not a number",
        ),
        "diagonal alone": Bad([("dy - (y * dy).sum(-1, keepdim=True)", "dy - y * dy")], "the gradient of the scores"),
    },
    "softmax-3": {
        "the page's softmax": Bad(
            "def weights(x, sink):\n    return torch.softmax(x, -1) + 0 * sink", "ordinary scores: the weights"
        ),
        "repaired behind": Bad(
            "def weights(x, sink):\n"
            "    m = x.detach().amax(-1, keepdim=True)\n"
            "    powers = torch.exp(x - m)\n"
            "    return (powers / (torch.exp(sink - m) + powers.sum(-1, keepdim=True))).nan_to_num(0)",
            "is not a number",
        ),
        "the sink has no gradient": Bad([("torch.exp(sink - largest)", "torch.exp(sink.detach() - largest)")], "sink"),
    },
}

CHEATS = {
    "softmax-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "gradients, forward_bytes, backward_bytes = [Anything()] * 3, Anything(), Anything()",
            "must be a whole number",
        ),
    },
    "softmax-2": {
        "the library's own": Bad(
            "def forward(x, temperature):\n"
            + _LIBRARY
            + "    return softmax(x / temperature)\ndef backward(x, y, dy, temperature):\n    return dy, 0",
            "the library's own is switched off",
        ),
    },
    "softmax-3": {
        "the library's own": Bad(
            "def weights(x, sink):\n    from dualpipe_lab.cp.softmax import Softmax\n"
            "    return Softmax.apply(torch.cat([x, sink.expand(len(x), 1)], -1))[:, :-1]",
            "the library's own is switched off",
        ),
    },
}
