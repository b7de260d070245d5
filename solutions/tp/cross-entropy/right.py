"""Right answers of another style to the exercises on cross-entropy."""

RIGHT = {
    "cross_entropy-2": {
        "log-sum-exp, two messages of one and two numbers": """
def loss_and_gradient(y, targets, first):
    low = torch.cat([y, y.new_full((len(y), 1), -torch.inf)], 1)
    top = low.amax(1)
    comm.all_reduce(top, "max")
    numbers = torch.arange(first, first + y.shape[1])
    hot = (targets[:, None] == numbers).to(y.dtype)
    e = (y - top[:, None]).exp()
    both = torch.cat([e.sum(1), (hot * (y - top[:, None])).sum(1)])
    comm.all_reduce(both)
    total, at = both.chunk(2)
    valid = (targets != -100).to(y.dtype)
    n = valid.sum().clamp(min=1)
    loss = (valid * (total.log() - at)).sum() / n
    return loss, (e / total[:, None] - hot) * (valid / n)[:, None]
""",
        "three messages": """
def loss_and_gradient(y, targets, first):
    V = y.shape[1]
    top = y.max(1).values if V else torch.full((len(y),), -torch.inf, dtype=y.dtype)
    comm.all_reduce(top, "max")
    e = torch.exp(y - top.unsqueeze(1))
    total = e.sum(1)
    comm.all_reduce(total)
    target = torch.zeros_like(total)
    rows = [t for t in range(len(y)) if first <= int(targets[t]) < first + V]
    for t in rows:
        target[t] = y[t, targets[t] - first]
    comm.all_reduce(target)
    keep = targets != -100
    n = max(keep.sum().item(), 1)
    loss = (torch.log(total) + top - target)[keep].sum() / n
    gradient = e / total.unsqueeze(1)
    for t in rows:
        gradient[t, targets[t] - first] -= 1
    gradient[~keep] = 0
    return loss, gradient / n
""",
    },
}
