"""Right answers of another style to the exercises on training."""

PLAN = "dp, zero, pp, microbatches = "

RIGHT = {
    "training-2": {
        "all of the step, then a share": """
def windows(num_bytes, length, global_batch, seed, step, data_rank, data_size, num_microbatches):
    if global_batch % (data_size * num_microbatches):
        raise ValueError("choose another plan")
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    full = torch.randint(num_bytes - length, (global_batch,), generator=generator)
    return full.view(data_size, num_microbatches, -1)[data_rank]
""",
        "hashes": """
import hashlib

def windows(num_bytes, length, global_batch, seed, step, data_rank, data_size, num_microbatches):
    parts, own = data_size * num_microbatches, []
    if global_batch % parts != 0:
        raise ValueError(f"{global_batch} % {parts}")
    b = global_batch // parts
    for m in range(num_microbatches):
        place = (data_rank * num_microbatches + m) * b
        digests = [hashlib.sha256(repr((seed, step, place + k)).encode()).digest() for k in range(b)]
        own.append(tuple(int.from_bytes(d, "big") % (num_bytes - length) for d in digests))
    return tuple(own)
""",
    },
    "training-3": {
        "three data ranks": PLAN + "3, 1, 2, 8",
        "half as many microbatches": PLAN + "[2, 1, 3, 6]",
    },
    "training-4": {
        "one backward": """
def mean_step(table, batch):
    ids, targets = (torch.cat(part) for part in zip(*batch))
    valid = targets >= 0
    sums = torch.stack([cross_entropy(table[ids[valid]], targets[valid], reduction="sum"), valid.sum().double()])
    sums[0].backward()
    both = sums.detach().clone()
    comm.all_reduce(both)
    comm.all_reduce(table.grad)
    table.grad /= both[1]
    return both[0] / both[1]
""",
        "means that are weighted": """
def mean_step(table, batch):
    counts = torch.tensor([float((targets >= 0).sum()) for _, targets in batch], dtype=torch.float64)
    all_counts = counts.sum()
    comm.all_reduce(all_counts)
    table.grad = torch.zeros_like(table)
    loss = sum(
        cross_entropy(table[ids], targets) * count / all_counts
        for (ids, targets), count in zip(batch, counts)
        if count
    )
    if counts.any():
        loss.backward()
    loss = torch.as_tensor(loss, dtype=torch.float64).detach().clone()
    for tensor in (table.grad, loss):
        comm.all_reduce(tensor)
    return float(loss)
""",
    },
}
