"""What must divide for attention heads to be spread over ranks: plain arithmetic, before any process starts.

Chapter: book/tp/gqa.  In: sizes of the whole layer, t ranks.  Out: nothing, or a `ValueError`.
"""


def check_heads(
    hidden_size: int, num_heads: int, num_kv_heads: int, tp_size: int, head_size: int | None = None
) -> None:
    """Refuse heads that do not divide as they must.

    Raises:
        ValueError: naming the rule and the values.
    """
    if head_size is None and hidden_size % num_heads:
        raise ValueError(f"hidden_size must divide by num_heads, got {hidden_size} and {num_heads}; or give head_size")
    if (head_size or hidden_size // num_heads) % 2:
        raise ValueError(f"rotary positions need an even head_size, got {head_size or hidden_size // num_heads}")
    if num_heads % num_kv_heads:
        raise ValueError(f"every key head serves as many query heads, got {num_heads} for {num_kv_heads} key heads")
    if num_heads % tp_size:
        raise ValueError(f"num_heads must divide among the ranks, got {num_heads} on {tp_size} ranks")
    if num_kv_heads % tp_size and tp_size % num_kv_heads:
        raise ValueError(
            f"key heads must divide among the ranks, or ranks among key heads, got {num_kv_heads} heads on {tp_size} "
            "ranks"
        )
