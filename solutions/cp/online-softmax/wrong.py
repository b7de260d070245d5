"""Typical wrong answers and lazy cheats of the exercises on the online softmax."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "l, A, average, weight_reads, average_reads = "
_CARRIES_ALL = """
def state_of(x, values):
    return (x, values)
def merge(a, b):
    return torch.cat([a[0], b[0]], 1), torch.cat([a[1], b[1]])
def output(state):
    return {softmax} @ state[1]
"""
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
    "online_softmax-1": {
        "added": Bad(_PREDICT + "13, 24, 3, 2000, 1000", "measured from ln 2"),
        "A not scaled": Bad(_PREDICT + "7, 24, 3, 2000, 1000", "shrinks by the same factor"),
        "three passes": Bad(_PREDICT + "7, 21, 3, 3000, 1000", "that is the safe softmax"),
    },
    "online_softmax-2": {
        "A not scaled": Bad([("first * a[2] + second * b[2]", "a[2] + b[2]")], "two blocks, merged from the left"),
        "divides by zero": Bad([("state[1].masked_fill(state[1] == 0, 1)", "state[1]")], "a hidden row"),
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
    "online_softmax-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "l = A = average = weight_reads = average_reads = Anything()", "must be a whole number"
        ),
    },
    "online_softmax-2": {
        "carries everything": Bad(
            _CARRIES_ALL.format(softmax="torch.exp(state[0] - state[0].logsumexp(1, keepdim=True)).nan_to_num(0)"),
            "grows with the number of keys",
        ),
        "the library's own": Bad(
            "from dualpipe_lab.cp.online_softmax import online_average\n"
            + _CARRIES_ALL.format(softmax="online_average(state[0], state[1], 4)"),
            "the library's own is switched off",
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
