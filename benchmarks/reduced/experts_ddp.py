"""Experts on other ranks x DDP: an expert's gradient is a sum over the ranks where DDP's is a mean (pytorch 160285)."""

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

import dualpipe_lab as lab


def gradient(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of this rank's expert, and that of one process with the whole batch.

    Each rank has four tokens, and sends two to either expert; its loss is the mean over its own tokens.
    """
    torch.manual_seed(0)
    tokens = torch.randn(2, 4, 3, dtype=torch.float64)  # rank, token, width
    experts = torch.randn(2, 3, 3, dtype=torch.float64)

    whole = experts.clone().requires_grad_()
    rows = tokens.unflatten(1, (2, 2))  # rank, expert, token, width
    torch.einsum("retw,ewv->retv", rows, whole).square().sum(-1).mean().backward()

    mine = experts[rank].clone().requires_grad_()
    arrived = all_to_all_single_autograd(tokens[rank], [2, 2], [2, 2], dist.group.WORLD)
    back = all_to_all_single_autograd(arrived @ mine, [2, 2], [2, 2], dist.group.WORLD)
    back.square().sum(-1).mean().backward()  # the gradients of what is not an expert are averaged by DDP
    return mine.grad, whole.grad[rank]


if __name__ == "__main__":
    found, right = lab.launch(gradient, 2)[0]
    print(f"{float((found / right).mean()):.6g} times the right one")
