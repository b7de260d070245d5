"""What a stage keeps."""


def rank_bytes(numel: int, num_shared: int, dtype_bytes: int, saved_bytes: int, num_live: int) -> int:
    """Bytes of weights, gradients, two moments of a shard of 1 / `num_shared`, and `num_live` activations."""
    shard = -(-numel // num_shared)
    return dtype_bytes * (2 * numel + 2 * shard) + num_live * saved_bytes
