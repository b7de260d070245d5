"""Right answers of another style to the exercises on the ring softmax."""

_BOTH_WAYS = """
    rank, N = comm.get_rank(), comm.get_world_size()
    pairs = torch.empty(N, 2, len(m), dtype=m.dtype)
    pairs[rank] = torch.stack([m, l])
    for i in range(N // 2):
        moves = [(pairs[rank - i], 1), (pairs[(rank + i) % N], -1)]
        came = turn(*moves[: N - 1 - 2 * i])
        for step, pair in zip((-1, 1), came):
            pairs[(rank + step * (i + 1)) % N] = pair
"""

RIGHT = {
    "ring_softmax-2": {
        "pairs in a tensor by owner": f"""
def max_and_sum(m, l):
    {_BOTH_WAYS}
    M = pairs[:, 0].amax(0)
    factors = torch.exp(pairs[:, 0] - M.masked_fill(M == -torch.inf, 0))
    return M, (factors * pairs[:, 1]).sum(0)
""",
        "log-sum-exp in the order of owners": f"""
def max_and_sum(m, l):
    {_BOTH_WAYS}
    top, total = pairs[0]
    for other, part in pairs[1:]:
        new = torch.maximum(top, other)
        safe = torch.where(new == -torch.inf, 0, new)
        top, total = new, total * (top - safe).exp() + part * (other - safe).exp()
    return top, total
""",
    },
}
