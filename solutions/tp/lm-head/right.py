"""Right answers of another style to the exercises on the LM head."""

RIGHT = {
    "lm_head-2": {
        "concatenated": """
def padded_loss(x, weight, targets, first, vocabulary_size):
    real = min(max(vocabulary_size - first, 0), len(weight))
    logits = copy_to_ranks(x) @ weight[:real].t()
    logits = torch.cat([logits, logits.new_full((len(x), len(weight) - real), -torch.inf)], 1)
    return cross_entropy(logits, targets, len(weight) * comm.get_world_size())
""",
        "a very large negative number": [("-torch.inf", "torch.finfo(logits.dtype).min")],
    },
    "lm_head-3": {
        "topk-free, with where": """
def likeliest(y, first):
    lowest = torch.full((len(y), 1), -torch.inf, dtype=y.dtype)
    own = torch.cat([y, lowest], 1)
    best = own.max(1).values
    comm.all_reduce(best, "max")
    numbers = torch.arange(first, first + y.shape[1])
    entry = torch.where(y == best[:, None], numbers, 2**40)
    entry = torch.cat([entry, torch.full((len(y), 1), 2**40)], 1).amin(1)
    comm.all_reduce(entry, "min")
    return entry
""",
        "the negative maximum of negative entries": """
def likeliest(y, first):
    best = y.amax(1) if y.numel() else torch.full((len(y),), float("-inf"), dtype=y.dtype)
    comm.all_reduce(best, "max")
    entry = torch.full((len(y),), -(2**60))
    for column in reversed(range(y.shape[1])):
        entry[y[:, column] == best] = -(first + column)
    comm.all_reduce(entry, "max")
    return -entry
""",
    },
}
