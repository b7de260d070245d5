"""Right answers of another style to the exercises on the gradient of a choice."""

RIGHT = {
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
