"""Right answers of another style to the exercises on FlashAttention-2."""

RIGHT = {}
