"""Typical wrong answers and lazy cheats of the exercises on distributed Adam."""

from bad_answer import EQUAL_TO_ALL, Bad

TYPICAL = {
    "distributed_adam-1": {
        "no padding": Bad("state_bytes, norm, clipped = 2664, 7, 3", "round up"),
        "sum of norms": Bad("state_bytes, norm, clipped = 2672, 11, 3", "norms do not add up"),
        "the shard by itself": Bad("state_bytes, norm, clipped = 2672, 7, 4", "this shard is a part of it"),
    },
    "distributed_adam-2": {
        "epsilon under the root": Bad([(").sqrt() + EPS)", " + EPS).sqrt())")], "after 1 step: weight 0 is"),
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
    },
    "distributed_adam-3": {
        "own norm": Bad([("    comm.all_reduce(square)\n", "")], "that is the norm of one rank's part"),
        "replicated on all": Bad(
            [
                ("in shards:\n        square", "in [*shards, *replicated]:\n        square"),
                ("    for tensor in replicated:\n        square += tensor.square().sum()\n", ""),
            ],
            "it counts once",
        ),
        "always scaled": Bad(
            [("min(1.0, max_norm / (norm + 1e-6))", "max_norm / (norm + 1e-6)")], "after clipping, expected"
        ),
    },
    "distributed_adam-4": {
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
