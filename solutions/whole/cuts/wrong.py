"""Typical wrong answers and lazy cheats of the exercises on one model on every cut."""

from bad_answer import Bad

WHOLE = '''
import torch
from torch.nn.functional import cross_entropy, silu

from dualpipe_lab.comm import get_rank
from mine.held import holders, part_of, sums


class Trainer:
    """Every rank trains the full model, and shows the parts of it."""

    def __init__(self, layers, rows, place, num_stages, size, heads, route, lr):
        self.heads, self.route, self.lr, self.t = heads, route, lr, 0
        self.position, self.member = divmod(get_rank(), size)
        self.size, self.each = size, len(layers) // num_stages
        self.full = [part_of(w, 0, 1) for w in layers]
        self.stages = {stage: at for stage, at in holders(rows).items() if self.position in at}
        self.leaves = [leaf for leaves, _ in sums(self.full, [0], 0, 1) for leaf in leaves]
        self.moments = [[torch.zeros_like(leaf) for leaf in self.leaves] for _ in "ab"]
        self.show()

    def show(self):
        self.held = {}
        for stage, positions in self.stages.items():
            full = self.full[stage * self.each : (stage + 1) * self.each]
            self.held[stage] = [part_of(w, self.member, self.size) for w in full]
            grads = [part_of(self.grads_of(w), self.member, self.size) for w in full]
            for own, of_grads in zip(self.held[stage], grads):
                pairs = zip(sums([own], positions, self.member, self.size), sums([of_grads], positions, 0, self.size))
                for (leaves, ranks), (values, _) in pairs:
                    for leaf, value in zip(leaves, values):
                        leaf.grad = value.detach() / len(ranks)

    def grads_of(self, w):
        def grad(x):
            return torch.zeros_like(x) if x.grad is None else x.grad

        return {name: [grad(x) for x in value] if isinstance(value, list) else grad(value) for name, value in w.items()}

    def step(self, ids, targets):
        for leaf in self.leaves:
            leaf.grad = None
        x, first, last = ids, self.full[0], self.full[-1]
        x = first["embed"][ids]
        for w in self.full:
            h = self.norm(x, w["norm1"])
            q, k, v = ((h @ w[n].mT).unflatten(-1, (self.heads, -1)).transpose(-3, -2) for n in "qkv")
            late = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
            mixed = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(late, -torch.inf).softmax(-1) @ v
            x = x + mixed.transpose(-3, -2).flatten(-2) @ w["o"].mT
            h = self.norm(x, w["norm2"])
            x = x + silu(h @ w["up"].mT) @ w["down"].mT + self.experts(h, w)
        y = self.norm(x, last["norm3"]) @ last["head"].mT
        loss = cross_entropy(y.flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        self.t += 1
        with torch.no_grad():
            for leaf, m, v in zip(self.leaves, *self.moments):
                grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                m += 0.1 * (grad - m)
                v += 0.001 * (grad**2 - v)
                leaf -= self.lr * m / (1 - 0.9**self.t) / ((v / (1 - 0.999**self.t)).sqrt() + 1e-8)
        self.show()
        return float(loss)

    @staticmethod
    def norm(x, scale):
        return scale * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def experts(self, h, w):
        k, groups, kept = self.route
        a = (h @ w["router"].mT).sigmoid()
        score = (a + w["bias"]).detach().unflatten(-1, (groups, -1))
        best = score.topk(2, -1).values.sum(-1).topk(kept, -1).indices
        off = torch.ones(score.shape[:-1], dtype=torch.bool).scatter(-1, best, False)
        chosen = score.masked_fill(off[..., None], -torch.inf).flatten(-2).topk(k, -1).indices
        a = a * torch.zeros_like(a).scatter(-1, chosen, 1.0)
        a = a / a.sum(-1, keepdim=True)
        parts = [(silu(h @ g.mT) * (h @ u.mT)) @ d.mT for g, u, d in zip(w["gates"], w["ups"], w["downs"])]
        return (torch.stack(parts, -2) * a[..., None]).sum(-2)
'''

TYPICAL = {
    "cuts-5": {
        "the first stage of a pair": Bad(
            [("for stage, _, _ in actions(token)}", "for stage, _, _ in actions(token)[:1]}")],
            "a pair names two stages",
        ),
        "experts dealt out in turn": Bad(
            [("value[member * here : (member + 1) * here]", "value[member::size]")], "experts are held in blocks"
        ),
        "experts summed over all ranks": Bad(
            [("(split, [position * size + member for position in positions])", "(split, everybody)")],
            "layer 0 up: sum is over ranks [0, 1], expected [0]",
        ),
    },
    "cuts-6": {
        "mirrors are not summed": Bad(
            [("sums(own, positions, self.member, size)", "sums(own, [self.position], self.member, size)")],
            "is norm1 summed over all members of all copies",
        ),
        "tokens in turn": Bad(
            [("x.chunk(self.size, 1)[self.member] for x", "x[:, self.member :: self.size] for x")],
            "Members of a group take consecutive tokens",
        ),
        "gradients of the step before": Bad([("leaf.grad = None", "pass")], ".grad cleared at the start of a step"),
    },
    "cuts-4": {
        "the last axis is dp": Bad([("rank // stride % size", "rank % size")], "are one data rank"),
        "from the left": Bad([("reversed(axes)", "axes")], "are one data rank"),
        "cp forgotten": Bad([('place["dp"], place["cp"]', 'place["dp"], 0')], "it reads positions"),
    },
}

CHEATS = {
    "cuts-5": {
        "nothing is summed": Bad(
            [
                (
                    "return [(common, everybody), (split, [position * size + member for position in positions])]",
                    "return []",
                )
            ],
            "is in no sum",
        ),
    },
    "cuts-6": {"the whole model on every rank": Bad(WHOLE, "bytes are sent in a step")},
    "cuts-4": {
        "everything everywhere": Bad(
            """
def share(rank, axes, batch, num_microbatches, length):
    return [list(range(batch))], list(range(length))
""",
            "reads sequences",
        )
    },
}
