"""Right answers of another style to the exercises on layouts for context parallelism."""

RIGHT = {
    "ring_layouts-2": {
        "sums of prefixes": """
def work(owner, num_ranks, window):
    before = [[0] * (len(owner) + 1) for _ in range(num_ranks)]
    for rank in range(num_ranks):
        for p, held_by in enumerate(owner):
            before[rank][p + 1] = before[rank][p] + (held_by == rank)
    table = []
    for rank in range(num_ranks):
        queries = [p for p, held_by in enumerate(owner) if held_by == rank]
        row = []
        for step in range(num_ranks):
            keys = before[(rank - step) % num_ranks]
            row.append(sum(keys[i + 1] - keys[0 if window is None else max(0, i + 1 - window)] for i in queries))
        table.append(row)
    return table
""",
        "tensors": """
import torch

def work(owner, num_ranks, window):
    owner = torch.tensor(owner)
    mine = torch.nn.functional.one_hot(owner, num_ranks)
    seen = mine.cumsum(0)
    if window is not None and window < len(owner):
        seen[window:] -= seen[:-window].clone()
    by_owner = torch.stack([seen[owner == rank].sum(0) for rank in range(num_ranks)])
    return torch.stack([by_owner[r, (r - torch.arange(num_ranks)) % num_ranks] for r in range(num_ranks)])
""",
    },
    "ring_layouts-3": {
        "moved the other way": "owner = tuple((p - p // 4) % 4 for p in range(24))",
        "rows by hand": """
rows = "0123", "3012", "2301", "1230", "0123", "3012"
owner = [int(rank) for row in rows for rank in row]
""",
    },
}
