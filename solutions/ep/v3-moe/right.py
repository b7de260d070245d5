"""Right answers of another style to the exercises on V3's layer of experts."""

RIGHT = {
    "v3_moe-2": {
        "token by token": """
def choose(values, k, num_groups, num_kept):
    chosen = []
    for row in values.tolist():
        size = len(row) // num_groups
        groups = [range(g * size, (g + 1) * size) for g in range(num_groups)]
        groups.sort(key=lambda group: -sum(sorted((row[i] for i in group), reverse=True)[:2]))
        allowed = [i for group in groups[:num_kept] for i in group]
        chosen.append(sorted(allowed, key=lambda i: -row[i])[:k])
    return torch.tensor(chosen)
""",
        "gathers the kept groups": """
def choose(values, k, num_groups, num_kept):
    size = values.shape[1] // num_groups
    best = values.view(-1, num_groups, size).sort(-1, descending=True).values[..., :2].sum(-1)
    kept = best.topk(num_kept, -1).indices
    experts = (kept[..., None] * size + torch.arange(size)).flatten(1)
    return experts.gather(1, values.gather(1, experts).topk(k, -1).indices)
""",
    },
    "v3_moe-3": {
        "softmax of the logarithms": """
def route(x, router, bias, k, scale):
    logits = x @ router.T
    indices = (logits.sigmoid() + bias).topk(k).indices
    return scale * torch.nn.functional.logsigmoid(logits).gather(1, indices).softmax(1), indices
""",
        "normalize": """
def route(x, router, bias, k, scale):
    scores = torch.sigmoid(torch.einsum("td,ed->te", x, router))
    with torch.no_grad():
        _, indices = torch.topk(scores + bias, k, dim=1)
    weights = torch.nn.functional.normalize(torch.take_along_dim(scores, indices, 1), p=1, dim=1)
    return weights * scale, indices
""",
    },
    "v3_moe-4": {
        "whole numbers": [
            ("torch.sign(load.double().mean() - load)", "torch.sign(load.sum() - len(load) * load)"),
        ],
        "one pass over all tokens": """
def train_step(router, microbatches, speed):
    x = torch.cat([router.weight.new_empty(0, router.weight.shape[1]), *microbatches])
    load = router.load_of(x).double()
    comm.all_reduce(load)
    mean = load.mean()
    router.bias = router.bias + speed * (load < mean).double() - speed * (load > mean).double()
""",
    },
    "v3_moe-5": {
        "where": """
def mask(values, kept):
    return torch.where(kept.repeat_interleave(values.shape[1] // kept.shape[1], 1), values, -torch.inf)
""",
        "adds zero or minus infinity": """
def mask(values, kept):
    hidden = torch.zeros_like(kept, dtype=values.dtype).masked_fill(kept.logical_not(), float("-inf"))
    return (values.unflatten(1, (kept.shape[1], -1)) + hidden.unsqueeze(2)).flatten(1)
""",
        "the least float there is": [("-torch.inf", "torch.finfo(values.dtype).min")],
    },
}
