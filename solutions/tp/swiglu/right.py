"""Right answers of another style to the exercises on SwiGLU."""

RIGHT = {
    "swiglu-2": {
        "with einsum": """
def gated_backward(dy, x, a, u, gate, up, down):
    s = 1 / (1 + torch.exp(-C * a))
    g, slope = a * s, s + C * a * s * (1 - s)
    dh = torch.einsum("...d,df->...f", dy, down)
    da, du = dh * u * slope, dh * g
    dx = torch.einsum("...f,fd->...d", da, gate) + torch.einsum("...f,fd->...d", du, up)
    comm.all_reduce(dx)
    weights = [torch.einsum("...f,...d->fd", t, x) for t in (da, du)]
    return dx, *weights, torch.einsum("...d,...f->df", dy, g * u)
""",
        "both branches in one product": """
def gated_backward(dy, x, a, u, gate, up, down):
    rows = lambda t: t.flatten(0, -2)
    s = torch.sigmoid(C * a)
    dh = dy @ down
    both = torch.cat([dh * u * s * (1 + C * a - C * a * s), dh * a * s], -1)
    dx = both @ torch.cat([gate, up])
    comm.all_reduce(dx)
    d_gate, d_up = (rows(both).T @ rows(x)).chunk(2)
    return dx, d_gate, d_up, rows(dy).T @ rows(a * s * u)
""",
    },
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
