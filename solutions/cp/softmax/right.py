"""Right answers of another style to the exercises on the softmax."""

RIGHT = {
    "softmax-2": {
        "log-sum-exp, the temperature's gradient a number": """
def forward(x, temperature):
    z = x / temperature
    lse = z.logsumexp(-1, keepdim=True)
    return (z - lse.masked_fill(lse == -torch.inf, 0)).exp()

def backward(x, y, dy, temperature):
    dz = y * (dy - (y * dy).sum(-1, keepdim=True))
    xx = x.masked_fill(x == -torch.inf, 0)
    return dz / temperature, -float((dz * xx).sum()) / temperature**2
""",
        "row by row": """
def forward(x, temperature):
    y = torch.zeros_like(x)
    for i, row in enumerate(x):
        sees = row > -torch.inf
        if sees.any():
            powers = torch.exp((row[sees] - row[sees].max()) / temperature)
            y[i, sees] = powers / powers.sum()
    return y

def backward(x, y, dy, temperature):
    dx, dt = torch.zeros_like(x), 0.0
    for i, row in enumerate(x):
        sees = row > -torch.inf
        dz = y[i, sees] * (dy[i, sees] - y[i] @ dy[i])
        dx[i, sees] = dz / temperature
        dt = dt - dz @ row[sees] / temperature**2
    return dx, dt
""",
    },
}
