"""Right answers of another style to the exercises on the gradient of a choice."""

RIGHT = {
    "topk_gradient-2": {
        "differences of logits": """
def logit_gradient(logits, indices, grad, scale):
    u = torch.gather(logits, 1, indices)
    logs = torch.minimum(u, torch.zeros_like(u)) - torch.log1p(torch.exp(-u.abs()))
    v = torch.exp(logs - logs.logsumexp(1, keepdim=True))
    dlog = v * grad * scale
    dlog = dlog - v * dlog.sum(1, keepdim=True)
    gradient = torch.zeros_like(logits)
    gradient.scatter_add_(1, indices, dlog * torch.sigmoid(-u))
    return gradient
""",
        "token by token": """
from math import exp, log1p

def logit_gradient(logits, indices, grad, scale):
    out = torch.zeros_like(logits)
    for t, chosen in enumerate(indices.tolist()):
        u = [float(logits[t, i]) for i in chosen]
        logs = [min(x, 0.0) - log1p(exp(-abs(x))) for x in u]
        powers = [exp(x - max(logs)) for x in logs]
        v = [p / sum(powers) for p in powers]
        mean = sum(a * float(g) for a, g in zip(v, grad[t]))
        for i, x, a, g in zip(chosen, u, v, grad[t].tolist()):
            slope = 1 / (1 + exp(x)) if x < 700 else 0.0
            out[t, i] = scale * a * (g - mean) * slope
    return out
""",
    },
    "topk_gradient-3": {
        "loads and tokens apart": """
def balance_share(logits, indices):
    num_experts = logits.shape[-1]
    load = torch.zeros(num_experts + 1, dtype=torch.float64)
    for expert in indices.flatten().tolist():
        load[expert] += 1
    load[-1] = len(logits)
    comm.all_reduce(load)
    f = load[:-1] / load[:-1].sum()
    return (logits.softmax(1) * f).sum() * num_experts / load[-1]
""",
        "one hot": """
def balance_share(logits, indices):
    T, E = logits.shape
    counts = torch.nn.functional.one_hot(indices, E).sum((0, 1))
    counts = torch.cat([counts, counts.new_tensor([T])])
    comm.all_reduce(counts)
    *load, tokens = counts.tolist()
    f = logits.new_tensor(load) / sum(load)
    return E / tokens * torch.dot(f, torch.softmax(logits, -1).sum(0))
""",
    },
    "topk_gradient-4": {
        "softmax of what is chosen": """
def route(logits, k):
    indices = logits.sort(descending=True, stable=True).indices[:, :k]
    if k == 1:
        return indices, logits.softmax(-1).gather(1, indices)
    return indices, logits.gather(1, indices).softmax(-1)
""",
        "divided by the sum": """
def route(logits, k):
    indices = logits.argsort(dim=-1, descending=True, stable=True)[:, :k]
    weights = torch.softmax(logits, -1).gather(-1, indices)
    return indices, weights / (weights.sum(-1, keepdim=True) if k > 1 else 1)
""",
    },
}
