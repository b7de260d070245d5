"""Typical wrong answers and lazy cheats of the exercises on distributed Adam."""

from bad_answer import EQUAL_TO_ALL, Bad

TYPICAL = {
    "distributed_adam-1": {
        "no padding": Bad("state_bytes, norm, clipped = 2664, 7, 3", "round up"),
        "sum of norms": Bad("state_bytes, norm, clipped = 2672, 11, 3", "norms do not add up"),
        "the shard by itself": Bad("state_bytes, norm, clipped = 2672, 7, 4", "this shard is a part of it"),
        "unclipped": Bad("state_bytes, norm, clipped = 2672, 7, 6", "every shard shrinks"),
    },
    "distributed_adam-2": {
        "one step number for all": Bad(
            [
                ("def adamw_step", "STEPS = [0]\n\ndef adamw_step"),
                ('state["t"] += 1', 'STEPS[0] += 1; state["t"] = STEPS[0]'),
            ],
            "the second of two tensors that have a state each and take turns: rank 0, after 1 step",
        ),
        "the first lr for ever": Bad(
            [("nu=torch.zeros_like(w), t=0)", "nu=torch.zeros_like(w), t=0, lr=lr)\n    lr = state['lr']")],
            "that is with the lr of the first step",
        ),
        "spoils grad": Bad(
            [("    weights.copy_(padded", "    grad.zero_()\n    weights.copy_(padded")], "grad has changed"
        ),
        "steps from 0, late": Bad(
            [
                ('    state["t"] += 1\n', ""),
                ('state["mu"], state["nu"]\n', 'state["mu"], state["nu"]\n    state["t"] += 1\n'),
            ],
            "1 rank(s), 3 weights: rank 0, after 1 step: weight 0 is nan",
        ),
        "epsilon under the root": Bad([(").sqrt() + EPS)", " + EPS).sqrt())")], "after 1 step: weight 0 is"),
        "decay in the gradient": Bad(
            [("    w.mul_(1 - lr * decays)\n", ""), ("    mu.mul_", "    g = g + decays * w\n    mu.mul_")],
            "after 1 step: weight 0 is",
        ),
        "no gather": Bad([("    comm.all_gather_single(padded, w)\n", "")], "gather the shards after the update"),
        "slices of all": Bad(
            [
                (
                    "mu=torch.zeros_like(w), nu=torch.zeros_like(w)",
                    "mu=torch.zeros_like(padded).view(N, -1)[rank], nu=torch.zeros_like(padded).view(N, -1)[rank]",
                )
            ],
            "A rank keeps state for the weights it updates and no others",
        ),
        "sums again": Bad(
            [("    padded, *others", "    comm.all_reduce(grad)\n    grad /= N\n    padded, *others")],
            "bytes in 4 steps",
        ),
    },
    "distributed_adam-3": {
        "as it was": Bad(
            """
def clip(shards, replicated, max_norm):
    norm = torch.zeros((), dtype=torch.float64)
    for tensor in [*shards, *replicated]:
        norm += tensor.norm()
    comm.all_reduce(norm)
    for tensor in [*shards, *replicated]:
        tensor.mul_(min(1.0, max_norm / (float(norm) + 1e-6)))
    return float(norm)
""",
            "rank 0 says the norm is 6, it is 4.47214: a sum of the ranks' norms; squares add up",
        ),
        "own norm": Bad([("    comm.all_reduce(square)\n", "")], "that is the norm of one rank's part"),
        "replicated on all": Bad(
            [
                ("in shards:\n        square", "in [*shards, *replicated]:\n        square"),
                ("    for tensor in replicated:\n        square += tensor.square().sum()\n", ""),
            ],
            "it counts once",
        ),
        "no root": Bad([("float(square.sqrt())", "float(square)")], "that is the square of the norm"),
        "always scaled": Bad(
            [("min(1.0, max_norm / (norm + 1e-6))", "max_norm / (norm + 1e-6)")], "after clipping, expected"
        ),
        "replicated not clipped": Bad([("in [*shards, *replicated]:", "in shards:")], "on rank 0 a gradient is 4"),
    },
    "distributed_adam-4": {
        "the class counts": Bad(
            [
                ("weights, lr, 0", "weights, lr, None"),
                ("self.t += 1", "ShardedAdam.count = getattr(ShardedAdam, 'count', 0) + 1; self.t = ShardedAdam.count"),
            ],
            "the second of two tensors that have a state each and take turns: rank 0, after 1 step",
        ),
        "moments of all": Bad(
            """
class ShardedAdam:
    def __init__(self, weights, lr):
        self.weights, self.lr, self.t = weights, lr, 0
        self.mu, self.nu = torch.zeros_like(weights), torch.zeros_like(weights)
    def step(self, grad):
        self.t += 1
        self.mu.mul_(BETA1).add_(grad, alpha=1 - BETA1)
        self.nu.mul_(BETA2).add_(grad * grad, alpha=1 - BETA2)
        mu_hat, nu_hat = self.mu / (1 - BETA1**self.t), self.nu / (1 - BETA2**self.t)
        self.weights.sub_(self.lr * mu_hat / (nu_hat.sqrt() + EPS))
""",
            "2 rank(s), 40 weights: the weights are right, but rank 0 holds 1,280 bytes",
        ),
        "views of all": Bad(
            [("weights.new_zeros(len(weights[self.own]))", "torch.zeros_like(weights)[self.own]")],
            "holds 1,280 bytes beside two such tensors",
        ),
        "keeps the gradient": Bad(
            [("        self.t += 1\n", "        self.t += 1\n        self.grad = grad\n")], "beside two such tensors"
        ),
        "no gather": Bad([("        self.weights.copy_(whole[: len(self.weights)])", "")], "gather the shards after"),
    },
}

CHEATS = {
    "distributed_adam-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "state_bytes = norm = clipped = Anything()", "must be a whole number"
        ),
    },
    "distributed_adam-2": {
        "hidden state": Bad(
            """
HIDDEN = {}
def adamw_step(weights, grad, decay, state, lr):
    made = HIDDEN.setdefault(id(state), {})
    if not made:
        made.update(mu=torch.zeros_like(weights), nu=torch.zeros_like(weights), t=0)
    made["t"] += 1
    t, mu, nu = made["t"], made["mu"], made["nu"]
    mu.mul_(BETA1).add_(grad, alpha=1 - BETA1)
    nu.mul_(BETA2).add_(grad * grad, alpha=1 - BETA2)
    weights.mul_(1 - lr * decay)
    weights.sub_(lr * (mu / (1 - BETA1**t)) / ((nu / (1 - BETA2**t)).sqrt() + EPS))
""",
            "A rank keeps state for the weights it updates and no others",
        ),
        "the library's own": Bad(
            """
def adamw_step(weights, grad, decay, state, lr):
    from dualpipe_lab.dp.adam import adamw_
    adamw_(weights, grad, grad, grad, 1, lr=lr)
""",
            "the library's own is switched off",
        ),
    },
    "distributed_adam-3": {
        "a constant": Bad("def clip(shards, replicated, max_norm):\n    return 20**0.5", "it is 2"),
    },
    "distributed_adam-4": {
        "does nothing": Bad(
            "class ShardedAdam:\n    def __init__(self, *args):\n        pass\n    def step(self, grad):\n        pass",
            "1 rank(s), 3 weights: rank 0, after 1 step: weight 0 is",
        ),
        "torch's on everything": Bad(
            """
class ShardedAdam:
    def __init__(self, weights, lr):
        self.weights = torch.nn.Parameter(weights)
        self.optimizer = torch.optim.AdamW([self.weights], lr, weight_decay=0.0)
    def step(self, grad):
        self.weights.grad = grad
        self.optimizer.step()
        self.weights.grad = None
""",
            "the weights are right, but rank 0 holds",
        ),
    },
}
