"""ZeRO-1: each rank keeps Adam's moments of its own shard."""

from collections.abc import Iterable

import torch
from torch import Tensor

from dualpipe_lab.comm import get_rank

from .ring import all_gather, padded, reduce_scatter


class ShardedAdam:
    """Adam on a shard; gradients are summands, and all ranks have the parameters in one order."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        ranks: list[int],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.parameters, self.ranks, self.lr, self.betas, self.eps = list(parameters), ranks, lr, betas, eps
        self.num_steps = 0
        size = -(-sum(parameter.numel() for parameter in self.parameters) // len(ranks))
        self.first, self.second = (self.parameters[0].detach().new_zeros(size) for _ in range(2))

    @torch.no_grad()
    def step(self) -> None:
        """Sum the gradients, move this rank's shard, gather the weights; gradients stay as they are."""
        num, me = len(self.ranks), self.ranks.index(get_rank())
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        grad, flat = (padded(torch.cat([x.flatten() for x in xs]), num) for xs in (grads, self.parameters))
        grad, shard = reduce_scatter(grad, self.ranks), flat.view(num, -1)[me].clone()
        self.num_steps += 1
        for moment, beta, value in zip((self.first, self.second), self.betas, (grad, grad.square()), strict=True):
            moment.mul_(beta).add_(value, alpha=1 - beta)
        first, second = (
            moment / (1 - beta**self.num_steps)
            for moment, beta in zip((self.first, self.second), self.betas, strict=True)
        )
        shard -= self.lr * first / (second.sqrt() + self.eps)
        whole, sizes = all_gather(shard, self.ranks), [parameter.numel() for parameter in self.parameters]
        for parameter, part in zip(self.parameters, whole[: sum(sizes)].split(sizes), strict=True):
            parameter.copy_(part.view_as(parameter))
