"""What a rank keeps: weights, gradients, its shard of Adam's moments, activations."""


def rank_bytes(numel: int, num_shared: int, dtype_bytes: int, saved_bytes: int, num_live: int) -> int:
    """Bytes of a rank with `numel` weights, whose moments `num_shared` ranks share, and `num_live` activations."""
    shard = -(-numel // num_shared)  # rounded up: the last rank's is padded
    return dtype_bytes * (2 * numel + 2 * shard) + num_live * saved_bytes
