"""Right answers of another style to the exercises on topology."""

RIGHT = {
    "topology-2": {
        "ranks sorted by their other coordinates": """
def groups(axes, along):
    def coordinates(rank):
        found = {}
        for name, size in reversed(axes):
            rank, found[name] = divmod(rank, size)
        return found

    held = {}
    for rank in range(prod(size for _, size in axes)):
        key = tuple(value for name, value in coordinates(rank).items() if name not in along)
        held.setdefault(key, []).append(rank)
    return sorted(tuple(ranks) for ranks in held.values())
""",
        "a grid of torch, and lists": """
def groups(axes, along):
    sizes = [size for _, size in axes]
    grid = torch.arange(prod(sizes)).reshape(sizes)
    inside = [place for place, (name, _) in enumerate(axes) if name in along]
    outside = [place for place in range(len(axes)) if place not in inside]
    size = prod(sizes[place] for place in inside)
    return sorted(grid.permute(outside + inside).reshape(-1, size).tolist())
""",
    },
}
