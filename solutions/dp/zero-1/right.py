"""Right answers of another style to the exercises on ZeRO-1."""

RIGHT = {
    "zero_1-5": {
        "messages to everybody at once": """
import torch
from dualpipe_lab import comm


class ShardedAdam:
    def __init__(self, parameters, ranks, lr, betas=(0.9, 0.999), eps=1e-8):
        self.ps, self.ranks, self.settings = list(parameters), ranks, (lr, *betas, eps)
        self.me, self.t, self.state = ranks.index(comm.get_rank()), 0, None

    def row(self, values):
        num = len(self.ranks)
        out = torch.zeros(-(-sum(p.numel() for p in self.ps) // num) * num, dtype=self.ps[0].dtype)
        at = 0
        for p, value in zip(self.ps, values):
            if value is not None:
                out[at : at + p.numel()] = value.detach().reshape(-1)
            at += p.numel()
        return list(out.chunk(num))

    def swap(self, blocks):
        arrived = {r: torch.empty_like(blocks[self.me]) for r in self.ranks if r != comm.get_rank()}
        works = [comm.irecv(x, r) for r, x in arrived.items()]
        works += [comm.isend(blocks[i].contiguous(), r) for i, r in enumerate(self.ranks) if r in arrived]
        for work in works:
            work.wait()
        return arrived

    def step(self):
        lr, b1, b2, eps = self.settings
        grads = self.row([p.grad for p in self.ps])
        g = grads[self.me].clone()
        for x in self.swap(grads).values():
            g += x
        m, v = self.state or (torch.zeros_like(g), torch.zeros_like(g))
        self.t += 1
        self.state = m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        own = self.row(self.ps)[self.me]
        own = own - lr * (m / (1 - b1**self.t)) / ((v / (1 - b2**self.t)) ** 0.5 + eps)
        others = self.swap([own] * len(self.ranks)) | {comm.get_rank(): own}
        row, at = torch.cat([others[r] for r in self.ranks]), 0
        for p in self.ps:
            p.data = row[at : at + p.numel()].reshape(p.shape).clone()
            at += p.numel()
""",
        "moments in one tensor, parameters as views": """
from collections.abc import Iterable

import torch
from dualpipe_lab.comm import get_rank
from mine.ring import all_gather, reduce_scatter


class ShardedAdam:
    def __init__(self, parameters, ranks, lr, betas=(0.9, 0.999), eps=1e-8):
        self.parameters = [*parameters]
        self.offsets, numel = [], 0
        for p in self.parameters:
            self.offsets.append(numel)
            numel += p.numel()
        self.size = (numel + len(ranks) - 1) // len(ranks)
        self.ranks, self.lr, self.betas, self.eps, self.beta_powers = ranks, lr, betas, eps, [1.0, 1.0]
        self.moments = torch.zeros(2, self.size, dtype=self.parameters[0].dtype)

    def step(self):
        weights = torch.zeros(self.size * len(self.ranks), dtype=self.moments.dtype)
        grads = torch.zeros_like(weights)
        with torch.no_grad():
            for p, at in zip(self.parameters, self.offsets):
                weights[at : at + p.numel()] = p.reshape(-1)
                if p.grad is not None:
                    grads[at : at + p.numel()] = p.grad.reshape(-1)
            grad = reduce_scatter(grads, self.ranks)
            for moment, power, number in zip(self.moments, (grad, grad**2), (0, 1)):
                moment += (1 - self.betas[number]) * (power - moment)
                self.beta_powers[number] *= self.betas[number]
            first, second = (m / (1 - power) for m, power in zip(self.moments, self.beta_powers))
            place = self.ranks.index(get_rank()) * self.size
            own = weights[place : place + self.size] - self.lr * first / (second.sqrt() + self.eps)
            weights = all_gather(own, self.ranks)
            for p, at in zip(self.parameters, self.offsets):
                p.set_(weights[at : at + p.numel()].view(p.shape))
""",
    },
    "zero_1-3": {
        "pads with zeros": """
def norm_of_shards(flat):
    N = comm.get_world_size()
    own = pad(flat, (0, -len(flat) % N)).view(N, -1)[comm.get_rank()]
    square = (own * own).sum()
    comm.all_reduce(square)
    return square.sqrt().item()
""",
        "a tensor of one number": [(".square().sum()", ".norm().square().reshape(1)")],
    },
}  # fmt: skip
