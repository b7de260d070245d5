"""Right answers of another style to the exercises on layers of experts."""

RIGHT = {
    "smoe-2": {
        "row by row": """
def input_grad(grad, h, w, weights, counts):
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    back = torch.einsum("ro,roi->ri", grad, weights[expert])
    return w[:, None] * back, torch.einsum("ri,ri->r", back, h)

def weight_grad(grad, h, w, counts):
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    dw = grad.new_zeros(len(counts), grad.shape[1], h.shape[1])
    return dw.index_add(0, expert, w[:, None, None] * grad[:, :, None] * h[:, None])
""",
        "slices, the weight on the gradient": """
def input_grad(grad, h, w, weights, counts):
    dh, dw, first = torch.empty_like(h), torch.empty_like(w), 0
    for expert, count in enumerate(counts):
        part = slice(first, first := first + count)
        back = torch.mm(grad[part], weights[expert])
        dw[part] = back.mul(h[part]).sum(-1)
        dh[part] = back * w[part].unsqueeze(1)
    return [dh, dw]

def weight_grad(grad, h, w, counts):
    out, first = [], 0
    for count in counts:
        part = slice(first, first := first + count)
        out.append(torch.einsum("ro,ri->oi", grad[part] * w[part].unsqueeze(1), h[part]))
    return torch.stack(out)
""",
    },
    "smoe-3": {
        "a row says for which expert it is": """
def layer(x, experts, weights, num_experts):
    share, top_k = len(weights), experts.shape[1]
    slots = experts.flatten()
    order = (slots // share).argsort(stable=True)
    sends = (slots // share).bincount(minlength=num_experts // share)
    receives = exchange_counts(sends[:, None])
    splits = Splits(tuple(sends.tolist()), tuple(receives.flatten().tolist()))
    own = all_to_all_rows_async(slots[order] % share, splits).wait()
    rows = all_to_all_rows_async(x[order // top_k], splits).wait()
    made = torch.stack([weights[e] @ row for e, row in zip(own, rows)]) if len(rows) else rows
    back = all_to_all_rows_async(made, splits.transposed).wait()
    return torch.zeros_like(x).index_add(0, order // top_k, back)
""",
        "one exchange per expert of a rank": """
def layer(x, experts, weights, num_experts):
    share, y = len(weights), torch.zeros_like(x)
    counts = experts.flatten().bincount(minlength=num_experts).view(-1, share)
    receives = exchange_counts(counts)
    for e, weight in enumerate(weights):
        tokens = [(experts == expert).any(1).nonzero()[:, 0] for expert in range(e, num_experts, share)]
        splits = Splits(tuple(map(len, tokens)), tuple(receives[:, e].tolist()))
        tokens = torch.cat(tokens)
        rows = all_to_all_rows_async(x[tokens], splits).wait() @ weight.T
        y.index_add_(0, tokens, all_to_all_rows_async(rows, splits.transposed).wait())
    return y
""",
    },
    "smoe-4": {
        "divided first": """
def finish(router, experts, copies, num_tokens):
    counts = torch.zeros(comm.get_world_size(), dtype=torch.int64)
    counts[comm.get_rank()] = num_tokens
    comm.all_reduce(counts)
    for p in router + experts:
        p.grad.div_(counts.sum())
    for p in router:
        comm.all_reduce(p.grad)
    if copies is not None:
        for p in experts:
            comm.all_reduce(p.grad, group=copies)
""",
        "averages, and the number of ranks put back": """
def finish(router, experts, copies, num_tokens):
    mean = torch.tensor(float(num_tokens), dtype=torch.float64)
    comm.all_reduce(mean, "avg")
    size = comm.get_world_size()
    for parameter in router:
        comm.all_reduce(parameter.grad, "avg")
        parameter.grad /= mean
    for parameter in experts:
        if copies is not None:
            comm.all_reduce(parameter.grad, "avg", copies)
            parameter.grad *= comm.get_world_size(copies)
        parameter.grad /= mean * size
""",
    },
}
