"""Right answers of another style to the exercises on the embedding."""

RIGHT = {
    "embedding-2": {
        "token by token": """
def look_up(ids, table, first):
    zero = torch.zeros(table.shape[1], dtype=table.dtype)
    rows = [table[i - first] if first <= i < first + len(table) else zero for i in ids.tolist()]
    found = torch.stack(rows)
    comm.all_reduce(found)
    return found
""",
        "a product with one-hot rows": """
def look_up(ids, table, first):
    numbers = torch.arange(first, first + len(table))
    found = (ids[:, None] == numbers).to(table.dtype) @ table
    comm.all_reduce(found)
    return found
""",
    },
}
