"""Right answers of another style to the exercises on the LM head."""

RIGHT = {
    "lm_head-2": {
        "a very large negative number": [("-torch.inf", "torch.finfo(logits.dtype).min")],
        "a bias": [
            (
                "    logits = logits.masked_fill(is_padding, -torch.inf)\n",
                "    logits = logits + torch.where(is_padding, -torch.inf, 0.0)\n",
            ),
        ],
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
