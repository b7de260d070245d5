"""ZeRO-1: each rank keeps Adam's moments of its own shard."""

from collections.abc import Iterable

import torch
from torch import Tensor

from dualpipe_lab.comm import get_rank

from .ring import all_gather, padded, reduce_scatter


class ShardedAdam:
    """Adam on this rank's shard; gradients are summands, and all ranks have the parameters in one order."""

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
        grad = reduce_scatter(_in_one_row(grads, num), self.ranks)
        shard = _in_one_row(self.parameters, num).view(num, -1)[me]

        self.num_steps += 1
        beta1, beta2 = self.betas
        self.first.mul_(beta1).add_(grad, alpha=1 - beta1)
        self.second.mul_(beta2).add_(grad.square(), alpha=1 - beta2)
        first = self.first / (1 - beta1**self.num_steps)  # both begin at zero, and are too small at first
        second = self.second / (1 - beta2**self.num_steps)
        shard -= self.lr * first / (second.sqrt() + self.eps)

        whole, sizes = all_gather(shard, self.ranks), [parameter.numel() for parameter in self.parameters]
        for parameter, numbers in zip(self.parameters, whole[: sum(sizes)].split(sizes), strict=True):
            parameter.copy_(numbers.view_as(parameter))


def _in_one_row(tensors: list[Tensor], num: int) -> Tensor:
    """All numbers, padded until `num` divides them: a shard may begin in the middle of a tensor."""
    return padded(torch.cat([tensor.flatten() for tensor in tensors]), num)
