"""A pipeline's step x clipping: each rank clips by the norm of its own stages (torchtitan 596)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B

import dualpipe_lab as lab


def norms(rank: int, world_size: int) -> tuple[float, float]:
    """Return the norm that clips this rank's gradients, and that of one process."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    nn.functional.mse_loss(layers(x), x).backward()
    right = float(nn.utils.clip_grad_norm_(layers.parameters(), float("inf")))
    layers.zero_grad()
    stage = PipelineStage(layers[rank], rank, world_size, torch.device("cpu"), group=dist.group.WORLD)
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank else {}))
    return float(nn.utils.clip_grad_norm_(layers[rank].parameters(), float("inf"))), right


if __name__ == "__main__":
    for rank, (found, right) in enumerate(lab.launch(norms, 2)):
        print(f"rank {rank}: {found:.4f}, one process {right:.4f}")
