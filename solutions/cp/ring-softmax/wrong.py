"""Typical wrong answers and lazy cheats of the exercises on the ring softmax."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "ring_bytes, reduce_bytes, ring_messages, reduce_messages, backward_bytes = "
_MERGES = """
def merge(a, b):
    m = torch.maximum(a[0], b[0])
    above = m.masked_fill(m == -torch.inf, 0)
    return torch.stack([m, sum(p[1] * (p[0] - above).exp() for p in (a, b))])
def max_and_sum(m, l):
    pair = torch.stack([m, l])
    held, left = [pair, pair], comm.get_world_size() - 1
    while left > 0:
        {turn}
        left -= 2
    return pair[0], pair[1]
"""
_AS_THEY_COME = """held = turn(*zip(held, (1, -1)[:left]))
        for came in held:
            pair = merge(pair, came)"""
_ONE_WAY = """
def max_and_sum(m, l):
    rank, N = comm.get_rank(), comm.get_world_size()
    pairs = {rank: torch.stack([m, l])}
    for i in range(1, N):
        (pairs[(rank - i) % N],) = turn((pairs[(rank - i + 1) % N], 1))
    M = torch.stack([pairs[r][0] for r in range(N)]).amax(0)
    above = M.masked_fill(M == -torch.inf, 0)
    return M, sum((pairs[r][0] - above).exp() * pairs[r][1] for r in range(N))
"""

TYPICAL = {
    "ring_softmax-1": {
        "one number": Bad(_PREDICT + "28_000, 14_000, 7, 28, 7_000", "a pair is two numbers"),
        "one all-reduce": Bad(_PREDICT + "56_000, 7_000, 7, 28, 7_000", "are two all-reduces"),
        "one half": Bad(_PREDICT + "56_000, 14_000, 7, 14, 7_000", "that is one all-reduce"),
    },
    "ring_softmax-2": {
        "one way round": Bad(_ONE_WAY, "3 rank(s): 2 messages waited for one another"),
        "merges as they come": Bad(_MERGES.format(turn=_AS_THEY_COME), "have other bits on rank"),
        "passes on what it merged": Bad(
            _MERGES.format(
                turn="held = turn(*zip((pair, pair), (1, -1)[:left]))\n"
                "        for came in held:\n            pair = merge(pair, came)"
            ),
            "400 rows on 3 rank(s), float32: all sums are right, and",
        ),
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
        "gathers the pairs": Bad(
            "def max_and_sum(m, l):\n"
            "    own = torch.stack([m, l])\n"
            "    all_pairs = own.new_empty(comm.get_world_size() * 2, len(m))\n"
            "    comm.all_gather_single(all_pairs, own)\n"
            "    M = all_pairs[::2].amax(0)\n"
            "    above = M.masked_fill(M == -torch.inf, 0)\n"
            "    return M, ((all_pairs[::2] - above).exp() * all_pairs[1::2]).sum(0)",
            "it calls comm.all_gather",
        ),
    },
}
