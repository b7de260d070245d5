"""Typical wrong answers and lazy cheats of the milestones of the project."""

from bad_answer import Bad

ONE, TWO, THREE, FOUR, FIVE, SIX = (f"project-{number}" for number in range(1, 7))

TYPICAL = {
    ONE: {
        "equal layers": Bad(
            [("    best = min(splits, key", "    best = max(splits, key")], "first stage and the last hold the table"
        ),
        "rows of o and down": Bad([('("o", "down")', '("gate", "up")')], "is cut along dimension"),
        "no table for the head": Bad([("number in (0, last)", "number == 0")], "the head uses the embedding's table"),
    },
    TWO: {
        "tied weights not summed": Bad([('if name == "embedding.weight":  #', "if False:  #")], "one of its two uses"),
        "norm counted twice over tp": Bad(
            [("            copies *= parts.plan.tp\n", "            pass\n")], "counted once per rank of tp"
        ),
        "averaged": Bad([("comm.all_reduce(parameter.grad, group=dp)", 'comm.all_reduce(parameter.grad, "avg", dp)')],
                        "0.5 times that of one process"),
    },
    THREE: {
        "moments without correction": Bad(
            """
class ShardedAdam:
    def __init__(self, weights, group, lr, betas, eps, weight_decay):
        self.weights, self.group, self.lr, self.betas, self.eps = weights, group, lr, betas, eps
        self.decay, self.state = 1 - lr * weight_decay, [torch.zeros(2, *weight.shape).double() for weight in weights]

    def step(self):
        with torch.no_grad():
            for weight, (first, second) in zip(self.weights, self.state):
                comm.all_reduce(weight.grad, group=self.group)
                first.lerp_(weight.grad, 1 - self.betas[0])
                second.lerp_(weight.grad.square(), 1 - self.betas[1])
                weight.mul_(self.decay).sub_(self.lr * first / (second.sqrt() + self.eps))
""",
            "moments without their corrections",
        ),
        "too much memory": Bad(
            """
class ShardedAdam:
    def __init__(self, weights, group, lr, betas, eps, weight_decay):
        self.weights, self.group = weights, group
        self.adam = torch.optim.AdamW(weights, lr, betas, eps, weight_decay, foreach=False)

    def step(self):
        for weight in self.weights:
            comm.all_reduce(weight.grad, group=self.group)
        self.adam.step()
""",
            "moments of all weights are too much memory",
        ),
        "too many bytes": Bad(
            [
                (
                    "comm.reduce_scatter_single(self.shard.grad, self.flat([weight.grad for weight in self.weights]), "
                    "group=self.group)",
                    "flat = self.flat([weight.grad for weight in self.weights])\n"
                    "        comm.all_reduce(flat, group=self.group)\n"
                    "        self.shard.grad.copy_(flat[self.rank * self.size :][: self.size])",
                )
            ],
            "an all-reduce brings every rank gradients that it does not need",
        ),
    },
    FOUR: {
        "illegal": Bad([("0F0 0F1 0F2 0I0 0W0", "0F0 0F1 0F2 0W0 0I0")], "the validator says"),
        "too much memory": Bad("rows = pp.schedules.build('zero_bubble_h1', 4, 8).rows()", "can hold 3"),
        "too slow": Bad(
            "rows = [' '.join(f'{s}F{m} {s}I{m} {s}W{m}' for m in range(8)) for s in range(4)]", "ticks of at most 78"
        ),
    },
    FIVE: {
        "repeats after a resume": Bad(
            [
                ("def starts(", "draws = Random(0)\n\n\ndef starts("),
                ('Random(f"{step}/{number}").random()', "draws.random()"),
            ],
            "the data repeat or change",
        ),
        "moments left out": Bad(
            [('state["exp_avg"], state["exp_avg_sq"]', 'state["exp_avg"] * 0, state["exp_avg_sq"] * 0')],
            "Adam's moments or their step count were not",
        ),
        "the same for all ranks": Bad([("range(data_rank * count, (data_rank + 1) * count)", "range(count)")],
                                      "the ranks together"),
    },
    SIX: {
        "experts summed over all": Bad([("group=dp if is_expert else everyone", "group=everyone")],
                                       "the ranks of ep hold other experts"),
        "loss divided twice": Bad(
            [("weights=[1.0] * len(batch.inputs)", "weights=[1 / len(batch.inputs)] * len(batch.inputs)")],
            "divided by the microbatches once more",
        ),
        "too many bytes": Bad(
            [
                ("        comm.all_reduce(parameter.grad, group=dp if is_expert else everyone)\n",
                 "        comm.all_reduce(parameter.grad, group=dp if is_expert else everyone)\n"
                 "        comm.all_reduce(parameter.grad.clone(), group=everyone)\n")
            ],
            "a gradient travels once per step",
        ),
    },
}  # fmt: skip

CHEATS = {
    ONE: {"nothing is held": Bad("def place(rank, sizes, shapes):\n    return {}", "every layer")},
    TWO: {
        "the library's norm": Bad(
            [("    total = torch.zeros((), dtype=torch.float64)\n",
              "    from dualpipe_lab import dp\n    dp.global_norm([], {})\n    total = torch.zeros(()).double()\n")],
            "the library's own is switched off",
        )
    },
    THREE: {
        "the library's": Bad(
            [("        self.weights, self.group = weights, group\n",
              "        from dualpipe_lab import dp\n        dp.Zero1(torch.nn.ParameterList(weights), group)\n"
              "        self.weights, self.group = weights, group\n")],
            "the library's own is switched off",
        )
    },
    FOUR: {"no work": Bad("rows = ['', '', '', '']", "4 ranks")},
    FIVE: {"always from the front": Bad([('int(Random(f"{step}/{number}").random() * (NUM_BYTES - LENGTH))', "0")],
                                        "the same sequences")},
    SIX: {"constants": Bad("def train_step(parts, batch, max_norm):\n    return 5.8, 1.0", "loss of step 1 differs")},
}  # fmt: skip
