"""Typical wrong answers and lazy cheats of the exercises on the ring softmax."""

from bad_answer import EQUAL_TO_ALL, Bad

_PREDICT = "ring_bytes, reduce_bytes, ring_messages, reduce_messages, backward_bytes = "
_MERGES = """
def merge(a, b):
    m = torch.maximum(a[0], b[0])
    above = m.masked_fill(m == -torch.inf, 0)
    return torch.stack([m, sum(p[1] * (p[0] - above).exp() for p in (a, b))])
def max_and_sum(m, l):
    pair = passing = torch.stack([m, l])
    for _ in range(comm.get_world_size() - 1):
        {turn}
    return pair[0], pair[1]
"""

TYPICAL = {
    "ring_softmax-1": {
        "one number": Bad(_PREDICT + "28_000, 14_000, 7, 28, 7_000", "a pair is two numbers"),
        "one all-reduce": Bad(_PREDICT + "56_000, 7_000, 7, 28, 7_000", "are two all-reduces"),
        "one half": Bad(_PREDICT + "56_000, 14_000, 7, 14, 7_000", "that is one all-reduce"),
        "two sums back": Bad(_PREDICT + "56_000, 14_000, 7, 28, 14_000", "one number per row"),
    },
    "ring_softmax-2": {
        "merges as they come": Bad(
            _MERGES.format(turn="passing = turn(passing); pair = merge(pair, passing)"),
            "have other bits on rank",
        ),
        "passes on what it merged": Bad(
            _MERGES.format(turn="pair = merge(pair, turn(pair))"),
            "400 rows on 3 rank(s), float32: rank 0: the sum of row",
        ),
        "merges in float64": Bad(
            _MERGES.format(turn="passing = turn(passing); pair = merge(pair.double(), passing.double())").replace(
                "return pair[0], pair[1]", "return pair[0].to(m.dtype), pair[1].to(m.dtype)"
            ),
            "float64: all sums are right, and",
        ),
        "own maximum": Bad(
            [("(pairs[r][0] - subtract).exp() * pairs[r][1]", "pairs[r][1]")], "the sum of row 2 (thousands apart)"
        ),
        "no guard": Bad([("subtract = largest.masked_fill(largest == -torch.inf, 0)", "subtract = largest")], "is nan"),
        "wrong owners": Bad([("(rank - i) % N", "(rank + i) % N")], "have other bits on rank"),
        "rank 0 tells": Bad(
            [("    return largest, total", "    comm.broadcast(total, 0)\n    return largest, total")],
            "it calls comm.broadcast",
        ),
    },
    "ring_softmax-3": {
        "as it was, guarded": Bad(
            [
                (
                    "    sums = torch.stack([losses.sum(), valid.sum().to(losses.dtype)])\n"
                    "    comm.all_reduce(sums)\n"
                    "    num_valid = sums[1].clamp(min=1)\n"
                    "    return sums[0] / num_valid, gradient / num_valid",
                    "    num_valid = valid.sum().clamp(min=1)\n"
                    "    loss = losses.sum() / num_valid\n"
                    '    comm.all_reduce(loss, "avg")\n'
                    "    return loss, gradient / num_valid / comm.get_world_size()",
                )
            ],
            "the mean of the ranks' means",
        ),
        "gradient by the own count": Bad(
            [("gradient / num_valid", "gradient / valid.sum().clamp(min=1)")], "2 times that of one process, the number"
        ),
        "counts padding": Bad([("valid.sum().to(losses.dtype)", "losses.new_tensor(len(losses))")], "one rank"),
        "nothing to divide by": Bad([("sums[1].clamp(min=1)", "sums[1]")], "a mean over nothing"),
        "no count": Bad([("    comm.all_reduce(sums)\n", "    comm.all_reduce(sums[:1])\n")], "the loss is"),
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
        "drops digits": Bad(
            _MERGES.format(turn="passing = turn(passing); pair = merge(pair, passing)").replace(
                "return pair[0], pair[1]", "return pair[0], pair[1].half().float()"
            ),
            "the sum of row",
        ),
        "the library's own": Bad(
            "def max_and_sum(m, l):\n"
            "    from dualpipe_lab.cp.ring_softmax import MaxSum, ring_max_sum\n"
            "    return tuple(ring_max_sum(MaxSum(m, l)))",
            "the library's own is switched off",
        ),
    },
    "ring_softmax-3": {
        "gathers the logits": Bad(
            "def loss_and_gradient(logits, labels):\n"
            "    N, r = comm.get_world_size(), comm.get_rank()\n"
            "    x, z = logits.new_empty(N * len(logits), logits.shape[1]), labels.new_empty(N * len(labels))\n"
            "    comm.all_gather_single(x, logits)\n"
            "    comm.all_gather_single(z, labels)\n"
            "    x.requires_grad_()\n"
            "    loss = torch.nn.functional.cross_entropy(x, z, reduction='sum') / (z != -100).sum().clamp(min=1)\n"
            "    loss.backward()\n"
            "    return loss.detach(), x.grad[r * len(logits) : (r + 1) * len(logits)]",
            "and no logits",
        ),
    },
}
