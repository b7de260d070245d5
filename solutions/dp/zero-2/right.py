"""Right answers of another style to the exercises on ZeRO-2."""

RIGHT = {
    "zero_2-3": {
        "a buffer of N rows": """
def scatter(p, shard):
    rows = shard.new_zeros(comm.get_world_size(), len(shard))
    rows.view(-1)[: p.numel()].copy_(p.grad.view(-1))
    part = shard.clone()
    comm.reduce_scatter_single(part, rows.view(-1))
    shard.add_(part)
    del p.grad
""",
        "drops .grad last": [("    p.grad = None\n", ""), ("    shard += own", "    shard += own\n    p.grad = None")],
    },
}
