"""Typical wrong answers and lazy cheats of the exercises on the ring softmax."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "ring_bytes, reduce_bytes, ring_messages, reduce_messages, backward_bytes = "

TYPICAL = {
    "ring_softmax-1": {
        "one number": Bad(_PREDICT + "28_000, 14_000, 7, 28, 7_000", "a pair is two numbers"),
        "one all-reduce": Bad(_PREDICT + "56_000, 7_000, 7, 28, 7_000", "are two all-reduces"),
        "one half": Bad(_PREDICT + "56_000, 14_000, 7, 14, 7_000", "that is one all-reduce"),
    },
    "ring_softmax-2": {
        "one way round": Bad(
            """
def max_and_sum(m, l):
    rank, N = comm.get_rank(), comm.get_world_size()
    pairs = {rank: torch.stack([m, l])}
    for i in range(1, N):
        (pairs[(rank - i) % N],) = turn((pairs[(rank - i + 1) % N], 1))
    M = torch.stack([pairs[r][0] for r in range(N)]).amax(0)
    above = M.masked_fill(M == -torch.inf, 0)
    return M, sum((pairs[r][0] - above).exp() * pairs[r][1] for r in range(N))
""",
            "3 rank(s): 2 messages waited for one another",
        ),
        "merges as they come": Bad(
            """
def merge(a, b):
    m = torch.maximum(a[0], b[0])
    above = m.masked_fill(m == -torch.inf, 0)
    return torch.stack([m, sum(p[1] * (p[0] - above).exp() for p in (a, b))])
def max_and_sum(m, l):
    pair = torch.stack([m, l])
    held, left = [pair, pair], comm.get_world_size() - 1
    while left > 0:
        held = turn(*zip(held, (1, -1)[:left]))
        for came in held:
            pair = merge(pair, came)
        left -= 2
    return pair[0], pair[1]
""",
            "have other bits on rank",
        ),
        "no guard": Bad([("subtract = largest.masked_fill(largest == -torch.inf, 0)", "subtract = largest")], "is nan"),
    },
}

CHEATS = {
    "ring_softmax-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "ring_bytes = reduce_bytes = ring_messages = reduce_messages = backward_bytes = Anything()",
            "must be a whole number",
        ),
    },
    "ring_softmax-2": {
        "the library's own": Bad(
            "def max_and_sum(m, l):\n"
            "    from dualpipe_lab.cp.ring_softmax import SoftmaxStats, ring_softmax_stats\n"
            "    return tuple(ring_softmax_stats(SoftmaxStats(m, l)))",
            "the library's own is switched off",
        ),
    },
}
