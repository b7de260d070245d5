"""Typical wrong answers and lazy cheats of the exercises on the online softmax."""

from bad_answer import Bad

_LOOP = """
def entropy(blocks):
    m, l, E = torch.tensor(-torch.inf), 0.0, 0.0
    for block in blocks:
        largest = torch.maximum(m, block.max())
        powers, factor = (block - largest).exp(), (m - largest).exp()
        E = {update}
        l = factor * l + powers.sum()
        m = largest
    return l.log() - E / l
"""

TYPICAL = {
    "online_softmax-4": {
        "one maximum for all rows": Bad(
            [(".amax(-1)\n", ".amax().expand(scores.shape[:-1])\n")], "Was the maximum of another row subtracted?"
        ),
        "no guard": Bad([("masked_fill(top == -torch.inf, 0)", "clone()")], "-inf - -inf is none"),
        "sum not scaled": Bad(
            [("of_a[..., None] * a[2] + of_b[..., None] * b[2]", "a[2] + b[2]")], "shrinks by the same factor"
        ),
        "no keys": Bad(
            [("torch.cat([scores, none], -1).amax(-1)", "scores.amax(-1)")], "blocks of (0, 3, 0, 2) keys: rank 0"
        ),
    },
    "online_softmax-3": {
        "rescaled as values are": Bad(
            _LOOP.format(update="factor * E + (powers * (block - largest)).sum()"),
            "x - m that they multiply are still measured from the maxima of their time",
        ),
        "moved by the first maximum too": Bad(
            _LOOP.format(update="factor * (E + (m - largest) * l) + (powers * (block - largest)).sum()"),
            "is not a number",
        ),
        "the softmax of everything": Bad(
            """
def entropy(blocks):
    log_p = torch.cat([x.clone() for x in blocks]).log_softmax(0)
    return -(log_p.exp() * log_p).sum()
""",
            "bytes are alive after two blocks",
        ),
    },
}

CHEATS = {
    "online_softmax-4": {
        "carries everything": Bad(
            """
import torch
def state_of(scores, values):
    return scores, values, values
def merge(a, b):
    return torch.cat([a[0], b[0]], -1), torch.cat([a[1], b[1]], 1), torch.cat([a[1], b[1]], 1)
""",
            "one of each per head and query",
        ),
        "torch's attention": Bad(
            """
from torch.nn.functional import scaled_dot_product_attention
def state_of(scores, values):
    return scores.amax(-1), scores.amax(-1).exp(), scaled_dot_product_attention(scores, scores, values)
def merge(a, b):
    return a
""",
            "scaled_dot_product_attention is off in softmax",
        ),
    },
    "online_softmax-3": {
        "the library's own": Bad(
            "def entropy(blocks):\n"
            "    from dualpipe_lab.cp.online_softmax import online_average\n"
            "    block = next(blocks)\n"
            "    return block.logsumexp(0) - online_average(block, block[:, None], 2)[0]",
            "the library's own is switched off",
        ),
    },
}
