"""Right answers of another style to the exercises on distributed Adam."""

RIGHT = {
    "distributed_adam-2": {
        "torch's lerp and addcmul": [
            ("    mu.mul_(BETA1).add_(g, alpha=1 - BETA1)\n", "    mu.lerp_(g, 1 - BETA1)\n"),
            ("nu.mul_(BETA2).add_(g * g, alpha=1 - BETA2)", "nu.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)"),
            ("if not state:", 'if "t" not in state:'),
        ],
        "the decay beside the update": [
            ("    w.mul_(1 - lr * decays)\n", ""),
            ("    w.sub_(lr * (mu", "    w.sub_(lr * decays * w + lr * (mu"),
        ],
    },
    "distributed_adam-3": {
        "one vector per kind": """
def clip(shards, replicated, max_norm):
    own = sum((float(t.double().pow(2).sum()) for t in shards), 0.0)
    total = torch.tensor([own], dtype=torch.float64)
    comm.all_reduce(total)
    norm = (float(total) + sum(float((t * t).sum()) for t in replicated)) ** 0.5
    if norm + 1e-6 > max_norm:
        for t in list(shards) + list(replicated):
            t *= max_norm / (norm + 1e-6)
    return norm
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
