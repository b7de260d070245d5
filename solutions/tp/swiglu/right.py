"""Right answers of another style to the exercises on SwiGLU."""

RIGHT = {
    "swiglu-3": {
        "by a view": """
def cut(gate_up, rank, num_ranks):
    return gate_up.view(2, num_ranks, -1, gate_up.shape[1])[:, rank].reshape(-1, gate_up.shape[1])

def join(parts):
    halves = torch.stack([part.view(2, -1, part.shape[1]) for part in parts], 1)
    return halves.reshape(-1, parts[0].shape[1])
""",
        "by slices": """
def cut(gate_up, rank, num_ranks):
    f = len(gate_up) // 2
    own = f // num_ranks
    return torch.cat([gate_up[start + rank * own : start + (rank + 1) * own] for start in (0, f)])

def join(parts):
    own = len(parts[0]) // 2
    return torch.cat([p[:own] for p in parts] + [p[own:] for p in parts])
""",
    },
}
