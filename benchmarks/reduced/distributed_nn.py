"""all_reduce of distributed.nn x a loss that every rank has: the backward adds equal gradients (pytorch 58005).

Its backward is right for a loss that is the sum of the ranks' losses.  A tensor-parallel model computes one loss, on
every rank: there the gradient of the sum is the gradient of each part, and Megatron's function sends nothing.
"""

import torch
from torch.distributed.nn.functional import all_reduce

import dualpipe_lab as lab


def gradient(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of this rank's partial product, and that of one process."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    whole = weight.clone().requires_grad_()
    (x @ whole).square().sum().backward()
    mine = weight.chunk(world_size)[rank].clone().requires_grad_()
    all_reduce(x.chunk(world_size, 1)[rank] @ mine).square().sum().backward()
    return mine.grad, whole.grad.chunk(world_size)[rank]


if __name__ == "__main__":
    for ranks in (2, 3):
        found, right = lab.launch(gradient, ranks)[0]
        print(f"{ranks} ranks: {float((found / right).mean()):.6g} times the right one")
