"""Right answers of another style to the exercises on the online softmax."""

RIGHT = {
    "online_softmax-2": {
        "average and LSE": """
def state_of(x, values):
    if x.shape[1] == 0:
        return x.new_zeros(len(x), values.shape[1]), x.new_full((len(x), 1), -torch.inf)
    lse = x.logsumexp(1, keepdim=True)
    return (x - lse.masked_fill(lse == -torch.inf, 0)).exp() @ values, lse

def merge(a, b):
    lse = torch.logaddexp(a[1], b[1])
    safe = lse.masked_fill(lse == -torch.inf, 0)
    return (a[1] - safe).exp() * a[0] + (b[1] - safe).exp() * b[0], lse

def output(state):
    return state[0]
""",
        "row by row, in numbers": """
from math import exp, inf

def state_of(x, values):
    m = [max([-inf, *row]) for row in x.tolist()]
    p = [[exp(s - top) if s > -inf else 0.0 for s in row] for row, top in zip(x.tolist(), m)]
    A = [[sum(w * v[d] for w, v in zip(row, values.tolist())) for d in range(values.shape[1])] for row in p]
    return tuple(torch.tensor(part, dtype=x.dtype) for part in (m, [sum(row) for row in p], A))

def merge(a, b):
    m = torch.maximum(a[0], b[0])
    first, second = (torch.where(s[0] == -inf, 0.0, (s[0] - m).exp()) for s in (a, b))
    return m, first * a[1] + second * b[1], first[:, None] * a[2] + second[:, None] * b[2]

def output(state):
    return torch.where(state[1][:, None] > 0, state[2] / state[1][:, None], 0.0)
""",
    },
    "online_softmax-3": {
        "average and LSE": """
def average(blocks):
    lse, out = torch.tensor(-torch.inf), 0.0
    for x, v in blocks:
        both = torch.logaddexp(lse, x.logsumexp(0))
        out = out * (lse - both).exp() + (x - both).exp() @ v
        lse = both
    return out
""",
        "score by score, in numbers": """
from math import exp, inf

def average(blocks):
    m, l, A = -inf, 0.0, None
    for x, v in blocks:
        A = [0.0] * v.shape[1] if A is None else A
        for s, row in zip(x.tolist(), v.tolist()):
            top = max(m, s)
            old, new, m = exp(m - top), exp(s - top), top
            l, A = old * l + new, [old * a + new * b for a, b in zip(A, row)]
    return torch.tensor([a / l for a in A], dtype=torch.float64)
""",
        "only when the maximum rises": [
            (
                "        factor = (m - largest).exp()\n        l = factor * l + powers.sum()\n",
                "        if largest > m:\n"
                "            l, A = l * (m - largest).exp(), A * (m - largest).exp()\n        l = l + powers.sum()\n",
            ),
            ("        A = factor * A + powers @ v", "        A = A + powers @ v"),
        ],
    },
}
