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
    "gqa-3": {
        "dk and dv in one message": """
def projections_backward(d_queries, d_keys, d_values, x, q, k, v, copies):
    dx = torch.cat([d_queries, d_keys, d_values], 1) @ torch.cat([q, k, v])
    comm.all_reduce(dx)
    both = torch.cat([d_keys, d_values], 1).T @ x
    if copies is not None:
        comm.all_reduce(both, group=copies)
    dk, dv = both.split([len(k), len(v)])
    return dx, d_queries.T @ x, dk, dv
""",
        "with einsum, weights first": """
def projections_backward(d_queries, d_keys, d_values, x, q, k, v, copies):
    grads = [torch.einsum("tf,td->fd", d, x) for d in (d_queries, d_keys, d_values)]
    if copies:
        for grad in grads[1:]:
            comm.all_reduce(grad, group=copies)
    dx = sum(d @ w for d, w in ((d_queries, q), (d_keys, k), (d_values, v)))
    comm.all_reduce(dx)
    return (dx, *grads)
""",
    },
    "gqa-4": {
        "one flat message": [
            (
                "        for weight in (layer.k.weight, layer.v.weight):\n"
                "            comm.all_reduce(weight.grad, group=layer.replicas)\n",
                "        both = torch.cat([layer.k.weight.grad, layer.v.weight.grad])\n"
                "        comm.all_reduce(both, group=layer.replicas)\n"
                "        layer.k.weight.grad, layer.v.weight.grad = both.chunk(2)\n",
            ),
        ],
        "the library's function": [
            (
                "    if layer.replicas is not None:\n"
                "        for weight in (layer.k.weight, layer.v.weight):\n"
                "            comm.all_reduce(weight.grad, group=layer.replicas)\n",
                "    from dualpipe_lab.tp import sum_partial_gradients\n    sum_partial_gradients(layer)\n",
            ),
        ],
    },
}
