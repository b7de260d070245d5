"""Right answers of another style to the exercises on distributed Adam."""

RIGHT = {
    "distributed_adam-2": {
        "slices that end where the weights end": """
def adamw_step(weights, grad, decay, state, lr):
    size = -(-len(weights) // comm.get_world_size())
    own = slice(comm.get_rank() * size, (comm.get_rank() + 1) * size)
    w, g = weights[own].clone(), grad[own]
    t = state["step"] = state.get("step", 0) + 1
    for name, beta, value in (("mu", BETA1, g), ("nu", BETA2, g**2)):
        state[name] = beta * state.get(name, 0.0) + (1 - beta) * value
    update = state["mu"] / (1 - BETA1**t) / (torch.sqrt(state["nu"] / (1 - BETA2**t)) + EPS)
    w = w * (1 - lr * decay[own]) - lr * update
    gathered = w.new_zeros(comm.get_world_size() * size)
    comm.all_gather_single(gathered, pad(w, (0, size - len(w))))
    weights.copy_(gathered[: len(weights)])
""",
        "torch's lerp and addcmul": [
            ("    mu.mul_(BETA1).add_(g, alpha=1 - BETA1)\n", "    mu.lerp_(g, 1 - BETA1)\n"),
            ("nu.mul_(BETA2).add_(g * g, alpha=1 - BETA2)", "nu.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)"),
            ("if not state:", 'if "t" not in state:'),
        ],
    },
    "distributed_adam-3": {
        "an N-th of what is replicated on each": """
def clip(shards, replicated, max_norm):
    N = comm.get_world_size()
    parts = [t.square().sum() for t in shards] + [t.square().sum() / N for t in replicated]
    square = torch.stack([torch.zeros((), dtype=torch.float64), *parts]).sum()
    comm.all_reduce(square)
    norm = square.sqrt()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for t in shards + replicated:
        t.mul_(scale)
    return norm.item()
""",
        "rank 0 alone adds what is replicated": [
            ("    comm.all_reduce(square)\n    for tensor in replicated:\n        square += tensor.square().sum()\n",
             "    if comm.get_rank() == 0:\n        square += sum(t.square().sum() for t in replicated)\n"
             "    comm.all_reduce(square)\n"),
        ],
    },
    "distributed_adam-4": {
        "padded shards": """
class ShardedAdam:
    def __init__(self, weights, lr):
        self.weights, self.lr, self.t, self.N = weights, lr, 0, comm.get_world_size()
        self.size = -(-len(weights) // self.N)
        self.mu, self.nu = (torch.zeros(self.size, dtype=weights.dtype) for _ in range(2))

    def own(self, x):
        return pad(x, (0, self.N * self.size - len(x))).view(self.N, -1)[comm.get_rank()]

    def step(self, grad):
        self.t += 1
        g, w = self.own(grad), self.own(self.weights).clone()
        self.mu = BETA1 * self.mu + (1 - BETA1) * g
        self.nu = BETA2 * self.nu + (1 - BETA2) * g * g
        w -= self.lr * (self.mu / (1 - BETA1**self.t)) / ((self.nu / (1 - BETA2**self.t)).sqrt() + EPS)
        whole = grad.new_empty(self.N * self.size)
        comm.all_gather_single(whole, w)
        self.weights.copy_(whole[: len(self.weights)])
""",
        "moments made at the first step": [
            ("        self.mu, self.nu = (weights.new_zeros(len(weights[self.own])) for _ in range(2))\n",
             "        self.mu = self.nu = None\n"),
            ("        self.t += 1\n        g, w", "        self.t += 1\n        if self.mu is None:\n"
             "            self.mu, self.nu = (torch.zeros_like(grad[self.own]) for _ in range(2))\n        g, w"),
        ],
    },
}  # fmt: skip
