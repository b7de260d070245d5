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
}
