"""Right answers of another style to the exercises on training."""

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
}
