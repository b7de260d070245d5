"""Right answers of another style to the exercises on the online softmax."""

RIGHT = {
    "online_softmax-4": {
        "the LSE in the place of the maximum": """
import torch

def state_of(scores, values):
    lse = scores.logsumexp(-1)
    is_seen = lse > -torch.inf
    weights = torch.where(is_seen[..., None], scores - lse[..., None], -torch.inf).exp()
    return lse, is_seen.to(scores.dtype), weights @ values

def merge(a, b):
    lse = torch.logaddexp(a[0], b[0])
    is_seen = lse > -torch.inf
    left, right = (torch.where(is_seen, part[0] - lse, -torch.inf).exp() for part in (a, b))
    return lse, is_seen.to(lse.dtype), left[..., None] * a[2] + right[..., None] * b[2]
""",
        "row by row, in numbers": """
from math import exp, inf

import torch

def _row(scores, values, size):
    top = max(scores, default=-inf)
    powers = [exp(score - top) if score > -inf else 0.0 for score in scores]
    return top, sum(powers), [sum(w * v[d] for w, v in zip(powers, values)) for d in range(size)]

def state_of(scores, values):
    heads, queries, size = scores.shape[0], scores.shape[1], values.shape[2]
    rows = [[_row(row, v, size) for row in head] for head, v in zip(scores.tolist(), values.tolist())]
    tensors = [torch.tensor([[row[i] for row in head] for head in rows], dtype=scores.dtype) for i in range(3)]
    return tensors[0], tensors[1], tensors[2].view(heads, queries, size)

def merge(a, b):
    swap = a[0] < b[0]
    high, low = torch.where(swap, b[0], a[0]), torch.where(swap, a[0], b[0])
    factor = torch.where(low == -inf, 0.0, torch.exp(low - high))
    big = [torch.where(swap, b[1], a[1]), torch.where(swap[..., None], b[2], a[2])]
    small = [torch.where(swap, a[1], b[1]), torch.where(swap[..., None], a[2], b[2])]
    return high, big[0] + factor * small[0], big[1] + factor.unsqueeze(-1) * small[1]
""",
    },
    "online_softmax-3": {
        "LSE and average score": """
def entropy(blocks):
    lse, mean = torch.tensor(-torch.inf), 0.0
    for x in blocks:
        both = torch.logaddexp(lse, x.logsumexp(0))
        mean = mean * (lse - both).exp() + (x - both).exp() @ x
        lse = both
    return lse - mean
""",
        "score by score, in numbers": """
from math import exp, inf, log

def entropy(blocks):
    m, l, E = -inf, 0.0, 0.0
    for block in blocks:
        for s in block.tolist():
            if s > m:
                if l:
                    E = exp(m - s) * (E + (m - s) * l)
                l, m = l * exp(m - s), s
            l, E = l + exp(s - m), E + exp(s - m) * (s - m)
    return torch.tensor(log(l) - E / l, dtype=torch.float64)
""",
    },
}
