"""TP x sequence parallelism x clipping until torch 2.11: a partial gradient is not scaled in place (pytorch 163374)."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import dualpipe_lab as lab


def clipped(rank: int, world_size: int) -> float:
    """Return the largest part of a clipped gradient, which is a tenth of itself."""
    mesh = init_device_mesh("cpu", (world_size,))
    norm = parallelize_module(nn.RMSNorm(4), mesh, SequenceParallel())
    norm(torch.arange(8.0).view(1, 2, 4) + rank).to_local().square().sum().backward()
    before = norm.weight.grad.full_tensor().clone()
    total = nn.utils.get_total_norm([norm.weight.grad]).full_tensor()
    nn.utils.clip_grad_norm_(norm.parameters(), float(total) / 10)
    return float((norm.weight.grad.full_tensor() / before).max())


if __name__ == "__main__":
    print(f"a gradient clipped to a tenth is {lab.launch(clipped, 2)[0]:.4g} of itself")
