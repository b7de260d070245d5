"""A pipeline's step x accumulation: each step divides all that is accumulated by the microbatches (torchtitan 1733)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B

import dualpipe_lab as lab


def gradient(rank: int, world_size: int, steps: int) -> torch.Tensor:
    """Return the gradient of this rank's stage after so many steps of the same batch, 4 microbatches each."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    stage = PipelineStage(layers[rank], rank, world_size, torch.device("cpu"), group=dist.group.WORLD)
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    for _ in range(steps):
        schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank else {}))
    return layers[rank].weight.grad


if __name__ == "__main__":
    once, twice, thrice = (lab.launch(gradient, 2, steps)[0] for steps in (1, 2, 3))
    print(f"2 steps: {float((twice / once).mean()):.6g} times one step's, 3 steps: {float((thrice / once).mean()):.6g}")
