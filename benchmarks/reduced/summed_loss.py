"""A pipeline's step x a summed loss: the gradient is divided by the microbatches, the loss is not (torchtitan 2972)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B

import dualpipe_lab as lab


def squares(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return a sum over all that the microbatch has."""
    return (found - wanted).square().sum()


def gradient(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of this rank's stage, and that of one process."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    (right,) = torch.autograd.grad(squares(layers(x), x), layers[rank].weight)
    stage = PipelineStage(layers[rank], rank, world_size, torch.device("cpu"), group=dist.group.WORLD)
    schedule = Schedule1F1B(stage, 4, loss_fn=squares)
    schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank else {}))
    return layers[rank].weight.grad, right


if __name__ == "__main__":
    found, right = lab.launch(gradient, 2)[0]
    print(f"{float((found / right).mean()):.6g} times the right one")
