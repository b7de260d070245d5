"""Right answers of another style to the exercises on distributed Adam."""

RIGHT = {
    "distributed_adam-3": {
        "an N-th of what is replicated on each": """
def clip(shards, replicated, max_norm):
    N = comm.get_world_size()
    parts = [t.square().sum() for t in shards] + [t.square().sum() / N for t in replicated]
    square = torch.stack([torch.zeros((), dtype=torch.float64), *parts]).sum()
    comm.all_reduce(square)
    norm = square.sqrt()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for t in shards + replicated:
        t.mul_(scale)
    return norm.item()
""",
        "rank 0 alone adds what is replicated": [
            ("    comm.all_reduce(square)\n    for tensor in replicated:\n        square += tensor.square().sum()\n",
             "    if comm.get_rank() == 0:\n        square += sum(t.square().sum() for t in replicated)\n"
             "    comm.all_reduce(square)\n"),
        ],
    },
}  # fmt: skip
