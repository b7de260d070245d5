"""Right answers of another style to the exercises on pipelines that are not a line."""

RIGHT = {
    "two_towers-2": {
        "images gathered as well": """
def gradients(a, c, scale):
    b, n_ranks = a.shape[0], comm.get_world_size()
    n = b * n_ranks
    all_a, all_c = a.new_empty(n, a.shape[1]), c.new_empty(n, c.shape[1])
    comm.all_gather_single(all_a, a)
    comm.all_gather_single(all_c, c)
    own = slice(comm.get_rank() * b, comm.get_rank() * b + b)
    dots = all_a @ all_c.t()
    p = torch.sigmoid(scale * dots) - torch.eye(n, dtype=a.dtype)
    p = p / n
    return scale * p[own] @ all_c, scale * p.t()[own] @ all_a, (p * dots).sum()
""",
        "row by row, the scale as one number": """
def gradients(a, c, scale):
    ranks, rank, b = comm.get_world_size(), comm.get_rank(), len(a)
    texts = c.new_empty(ranks * b, c.shape[1])
    comm.all_gather_single(texts, c.contiguous())
    da, all_dc, ds = torch.zeros_like(a), torch.zeros_like(texts), torch.zeros(1, dtype=a.dtype)
    for i in range(b):
        dots = texts @ a[i]
        p = 1 / (1 + torch.exp(-scale * dots))
        p[rank * b + i] -= 1
        da[i] = scale * (p @ texts)
        all_dc += scale * p[:, None] * a[i]
        ds += p @ dots
    dc = torch.empty_like(c)
    comm.reduce_scatter_single(dc, all_dc, "avg")
    comm.all_reduce(ds, "avg")
    return da / (b * ranks), dc / b, ds / b
""",
    },
}
