"""Typical wrong answers and lazy cheats of the exercises on distributed Adam."""

from bad_answer import EQUAL_TO_ALL, Bad

TYPICAL = {
    "distributed_adam-1": {
        "no padding": Bad("state_bytes, norm, clipped = 2664, 7, 3", "round up"),
        "sum of norms": Bad("state_bytes, norm, clipped = 2672, 11, 3", "norms do not add up"),
        "the shard by itself": Bad("state_bytes, norm, clipped = 2672, 7, 4", "this shard is a part of it"),
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
    },
    "distributed_adam-4": {
        "the class counts": Bad(
            [
                ("weights, lr, 0", "weights, lr, None"),
                ("self.t += 1", "ShardedAdam.count = getattr(ShardedAdam, 'count', 0) + 1; self.t = ShardedAdam.count"),
            ],
            "the second of two tensors that have a state each and take turns: rank 0, after 1 step",
        ),
        "views of all": Bad(
            [("weights.new_zeros(len(weights[self.own]))", "torch.zeros_like(weights)[self.own]")],
            "holds 1,280 bytes beside two such tensors",
        ),
        "keeps the gradient": Bad(
            [("        self.t += 1\n", "        self.t += 1\n        self.grad = grad\n")], "beside two such tensors"
        ),
    },
}

CHEATS = {
    "distributed_adam-1": {
        "equal to everything": Bad(
            EQUAL_TO_ALL + "state_bytes = norm = clipped = Anything()", "must be a whole number"
        ),
    },
    "distributed_adam-2": {
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
    },
}
