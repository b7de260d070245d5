"""Right answers of another style to the exercises on the ring softmax."""

RIGHT = {
    "ring_softmax-2": {
        "sorted before they are added": """
def max_and_sum(m, l):
    own = torch.stack([m, l])
    held, pairs = [own, own], [own]
    left = comm.get_world_size() - 1
    while left > 0:
        held = turn(*zip(held, (1, -1)[:left]))
        pairs += held
        left -= 2
    M = torch.stack([pair[0] for pair in pairs]).amax(0)
    safe = M.masked_fill(M == -torch.inf, 0)
    terms = torch.stack([pair[1] * (pair[0] - safe).exp() for pair in pairs])
    return M, terms.sort(0).values.sum(0)  # equal numbers in equal order, whoever had them
""",
        "straight to every rank": """
def max_and_sum(m, l):
    rank, N = comm.get_rank(), comm.get_world_size()
    own = torch.stack([m, l])
    pairs = turn(*[(own, step) for step in range(1, N)])[::-1] + [own]  # of the ranks behind, the farthest first
    by_owner = [pairs[(r - rank - 1) % N] for r in range(N)]
    M = torch.stack([pair[0] for pair in by_owner]).amax(0)
    safe = M.masked_fill(M == -torch.inf, 0)
    return M, sum(pair[1] * (pair[0] - safe).exp() for pair in by_owner)
""",
    },
}
