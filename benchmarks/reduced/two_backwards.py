"""DDP x two backwards of one forward: the second one is not summed over the ranks (pytorch 47260)."""

import torch
from torch import nn

import dualpipe_lab as lab


def gradient(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's gradient, and that of one process with the whole batch."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4, bias=False).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    (right,) = torch.autograd.grad(layer(x).square().mean(), layer.weight)
    outputs = nn.parallel.DistributedDataParallel(layer)(x.chunk(world_size)[rank])
    first, second = (half.square().mean() / 2 for half in outputs.chunk(2))
    first.backward(retain_graph=True)
    second.backward()
    return layer.weight.grad, right


if __name__ == "__main__":
    for rank, (found, right) in enumerate(lab.launch(gradient, 2)):
        worst, size = float((found - right).abs().max()), float(right.abs().max())
        print(f"rank {rank}: largest difference {worst:.1e}, of {size:.1e}")
