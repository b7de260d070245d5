"""Typical wrong answers and lazy cheats of the exercises on the softmax."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "gradients, forward_bytes, backward_bytes = "
_LIBRARY = "    from dualpipe_lab.cp.softmax import softmax, softmax_backward\n"

TYPICAL = {
    "softmax-1": {
        "y dy": Bad(_PREDICT + "[16, 4, 0], 12_000, 6_000", "is subtracted first"),
        "diagonal": Bad(_PREDICT + "[8, 3, 0], 12_000, 6_000", "the diagonal of the matrix alone"),
        "not weighted": Bad(_PREDICT + "[12, -4, -20], 12_000, 6_000", "the weight itself is still missing"),
        "one all-reduce": Bad(_PREDICT + "[6, -1, -5], 6_000, 6_000", "two all-reduces"),
        "nothing back": Bad(_PREDICT + "[6, -1, -5], 12_000, 0", "so over all ranks"),
    },
    "softmax-2": {
        "no maximum": Bad(
            [("scaled - largest.masked_fill(largest == -torch.inf, 0)", "scaled")],
            "scores of +-8,000: the weights: number 3 is not a number",
        ),
        "no guard": Bad(
            [("largest.masked_fill(largest == -torch.inf, 0)", "largest")], "a row that is hidden: the weights"
        ),
        "temperature forgotten in dx": Bad([("return scaled / temperature,", "return scaled,")], "all are 0.5 times"),
        "zero times infinity": Bad(
            [("x.masked_fill(x == -torch.inf, 0)", "x")],
            "hidden scores: the gradient of the temperature: number 0 is not a number",
        ),
        "sign": Bad([("-(scaled * visible)", "(scaled * visible)")], "all are -1 times"),
        "one temperature too few": Bad([("temperature**2", "temperature")], "all are 0.5 times"),
        "diagonal alone": Bad([("dy - (y * dy).sum(-1, keepdim=True)", "dy - y * dy")], "the gradient of the scores"),
        "far below is hidden": Bad(
            [("x.masked_fill(x == -torch.inf, 0)", "x.masked_fill(x < -10_000, 0)")], "scores below -20,000"
        ),
        "in float32": Bad(
            [("    scaled = x / temperature\n    l", "    scaled = (x / temperature).float()\n    l")],
            "is something float32 inside",
        ),
        "a matrix": Bad(
            [
                (
                    "    scaled = y * (dy - (y * dy).sum(-1, keepdim=True))",
                    "    matrix = torch.diag_embed(y) - y[:, :, None] * y[:, None]\n"
                    "    scaled = (matrix @ dy[:, :, None])[:, :, 0]",
                )
            ],
            "no matrix of derivatives is needed",
        ),
    },
    "softmax-3": {
        "the page's guard": Bad(
            """
def weights(x, sink):
    m = x.detach().amax(-1, keepdim=True)
    m = m.masked_fill(m == -torch.inf, 0)
    powers = torch.exp(x - m)
    return powers / (torch.exp(sink - m) + powers.sum(-1, keepdim=True))
""",
            "scores of +-8,000: the gradient of the sink: number 0 is not a number",
        ),
        "the page's softmax": Bad(
            "def weights(x, sink):\n    return torch.softmax(x, -1) + 0 * sink", "ordinary scores: the weights"
        ),
        "the sink is not measured from the maximum": Bad(
            [("torch.exp(sink - largest) +", "torch.exp(sink) +")], "ordinary scores: the weights"
        ),
        "repaired behind": Bad(
            "def weights(x, sink):\n"
            "    m = x.detach().amax(-1, keepdim=True)\n"
            "    powers = torch.exp(x - m)\n"
            "    return (powers / (torch.exp(sink - m) + powers.sum(-1, keepdim=True))).nan_to_num(0)",
            "is not a number",
        ),
        "far below is hidden": Bad(
            [("    powers =", "    x = x.masked_fill(x < 0, -torch.inf)\n    powers =")],
            "ordinary scores: the weights",
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
        "torch's own": Bad(
            "def forward(x, temperature):\n    return torch.softmax(x / temperature, -1).nan_to_num(0)\n"
            "def backward(x, y, dy, temperature):\n"
            "    dz = torch._softmax_backward_data(dy, y, -1, y.dtype)\n"
            "    x = x.masked_fill(x == -torch.inf, 0)\n"
            "    return dz / temperature, -(dz * x).sum() / temperature**2",
            "torch's own _softmax",
        ),
        "autograd": Bad(
            "def forward(x, temperature):\n    s = x / temperature\n"
            "    lse = s.logsumexp(-1, keepdim=True)\n"
            "    return (s - lse.masked_fill(lse == -torch.inf, 0)).exp()\n"
            "def backward(x, y, dy, temperature):\n    with torch.enable_grad():\n"
            "        x, t = x.clone().requires_grad_(), torch.tensor(temperature, requires_grad=True)\n"
            "        return torch.autograd.grad(forward(x, t), (x, t), dy)",
            "switched off",
        ),
    },
    "softmax-3": {
        "the library's own": Bad(
            "def weights(x, sink):\n    from dualpipe_lab.cp.softmax import Softmax\n"
            "    return Softmax.apply(torch.cat([x, sink.expand(len(x), 1)], -1))[:, :-1]",
            "the library's own is switched off",
        ),
        "no gradient": Bad(
            "def weights(x, sink):\n"
            "    return torch.softmax(torch.cat([x, sink.expand(len(x), 1)], -1).detach(), -1)[:, :-1]",
            "no gradient can reach",
        ),
    },
}
