"""Right answers of another style to the exercises on the softmax."""

_BACKWARD = """
def backward(x, y, dy, temperature):
    dz = y * (dy - (y * dy).sum(-1, keepdim=True))
    xx = x.masked_fill(x == -torch.inf, 0)
    return dz / temperature, {total} / temperature**2
"""
_LSE = """
def forward(x, temperature):
    z = x / temperature
    lse = z.logsumexp(-1, keepdim=True)
    return (z - lse.masked_fill(lse == -torch.inf, 0)).exp()
"""

RIGHT = {
    "softmax-2": {
        "log-sum-exp": _LSE + _BACKWARD.format(total="-(dz * xx).sum()"),
        "log-sum-exp, the temperature's gradient a number": _LSE + _BACKWARD.format(total="-float((dz * xx).sum())"),
    },
    "softmax-3": {
        "a column more": """
def weights(x, sink):
    return torch.softmax(torch.cat([x, sink.expand(len(x), 1)], -1), -1)[:, :-1]
""",
        "log-sum-exp with the sink": """
def weights(x, sink):
    lse = torch.logsumexp(torch.cat([sink.expand(len(x), 1), x], -1), -1, keepdim=True)
    return (x - lse).exp()
""",
    },
}
