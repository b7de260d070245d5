"""Right answers of another style to the exercises on V3's layer of experts."""

RIGHT = {
    "v3_moe-6": {
        "token by token": """
import torch
from mine.column import linear


def choose(x, router, bias, k, num_groups, num_kept):
    scores = torch.sigmoid(linear(x, router))
    size = router.shape[0] // num_groups
    rows = []
    for row in (scores.detach() + bias).tolist():
        groups = [range(g * size, (g + 1) * size) for g in range(num_groups)]
        groups.sort(key=lambda group: sum(sorted(row[e] for e in group)[-2:]), reverse=True)
        rows.append(sorted((e for group in groups[:num_kept] for e in group), key=lambda e: -row[e])[:k])
    chosen = torch.tensor(rows, dtype=torch.int64).view(len(x), k)
    weights = torch.take_along_dim(scores, chosen, 1)
    return chosen, torch.nn.functional.normalize(weights, p=1, dim=1)
""",
        "a mask, and logarithms": """
import torch
import mine.column as column


def choose(x, router, bias, k, num_groups, num_kept):
    logits = column.linear(x, router)
    with torch.no_grad():
        values = logits.sigmoid() + bias
        best, second = values.unflatten(1, (num_groups, values.shape[1] // num_groups)).topk(2).values.unbind(2)
        order = (best + second).argsort(dim=1, descending=True)[:, :num_kept].sort(1).values
        size = values.shape[1] // num_groups
        open_ones = (order[:, :, None] * size + torch.arange(size)).reshape(len(x), num_kept * size)
        places = values.gather(1, open_ones).argsort(dim=1)[:, -k:]
        chosen = open_ones.gather(1, places)
    return chosen, torch.nn.functional.logsigmoid(logits).gather(1, chosen).softmax(1)
""",
    },
    "v3_moe-3": {
        "an operator that counts on its way back": """
class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights, router, indices):
        ctx.router, ctx.indices = router, indices
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, grad):
        ctx.router.load += ctx.indices.flatten().bincount(minlength=len(ctx.router.load))
        return grad, None, None


class Router:
    def __init__(self, weight, bias):
        self.weight, self.bias, self.load = weight, bias, torch.zeros(len(bias), dtype=torch.int64)

    def __call__(self, x):
        scores = (x @ self.weight.T).sigmoid()
        indices = group_limited_topk(scores.detach() + self.bias, 2)
        weights = torch.nn.functional.normalize(scores.gather(1, indices), p=1, dim=1)
        return Counted.apply(weights, self, indices), indices
""",
        "a hook on the scores": """
class Router:
    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias
        self.load = torch.zeros(len(bias), dtype=torch.int64)

    def __call__(self, x):
        scores = torch.sigmoid(torch.einsum("td,ed->te", x, self.weight))
        indices = (scores.detach() + self.bias).topk(2).indices

        def count(grad):
            self.load.index_add_(0, indices.flatten(), torch.ones_like(indices.flatten()))

        if scores.requires_grad:
            scores.register_hook(count)
        chosen = torch.take_along_dim(scores, indices, 1)
        return chosen / chosen.sum(1, keepdim=True), indices
""",
    },
}
