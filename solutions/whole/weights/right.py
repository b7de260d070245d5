"""Right answers of another style to the exercises on weights from elsewhere."""

RIGHT = {
    "weights-4": {
        "even rows, then odd ones": [
            (
                "        pairs = weight.unflatten(0, (heads, -1, 2))\n"
                "        return pairs.transpose(1, 2).flatten(0, 2)\n",
                "        parts = [part for head in weight.chunk(heads) for part in (head[::2], head[1::2])]\n"
                "        return torch.cat(parts)\n",
            ),
        ],
        "an index": """
def to_halves(q, k, num_heads, num_kv_heads):
    size = len(q) // num_heads
    order = [*range(0, size, 2), *range(1, size, 2)]
    def rows(heads):
        return [head * size + row for head in range(heads) for row in order]
    return q[rows(num_heads)], k[rows(num_kv_heads)]
""",
    },
}
