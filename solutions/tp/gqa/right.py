"""Right answers of another style to the exercises on grouped-query attention."""

RIGHT = {
    "gqa-2": {
        "by asking all": """
def heads_of(rank, num_ranks, num_heads, num_kv_heads):
    def keys(r):
        size = num_heads // num_ranks
        return sorted({q * num_kv_heads // num_heads for q in range(r * size, r * size + size)})

    size = num_heads // num_ranks
    queries = [q for q in range(num_heads) if q // size == rank]
    return queries, keys(rank), [r for r in range(num_ranks) if keys(r) == keys(rank)]
""",
        "tensors": """
def heads_of(rank, num_ranks, num_heads, num_kv_heads):
    queries = torch.arange(num_heads).chunk(num_ranks)[rank]
    keys = torch.arange(num_kv_heads).repeat_interleave(num_heads // num_kv_heads)[queries].unique()
    copies = max(num_ranks // num_kv_heads, 1)
    return queries, keys, torch.arange(num_ranks).split(copies)[rank // copies]
""",
    },
}
