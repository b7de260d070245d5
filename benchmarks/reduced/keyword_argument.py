"""A pipeline's step x a keyword without a batch dimension: it is divided among the microbatches (Automodel 3208)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B

import dualpipe_lab as lab


class Positions(nn.Module):
    """Adds a table (length, 1) to what comes in (batch, length, width)."""

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Run it."""
        return x + table


def output(rank: int, world_size: int) -> torch.Tensor | None:
    """Return what the last stage has; the table's length is the number of microbatches, so every shape fits."""
    x, table = torch.zeros(8, 4, 3, dtype=torch.float64), torch.arange(4.0, dtype=torch.float64)[:, None]
    module = nn.Identity() if rank else Positions()
    stage = PipelineStage(module, rank, world_size, torch.device("cpu"), group=dist.group.WORLD)
    found = Schedule1F1B(stage, 4).step(*([] if rank else [x]), **({} if rank else {"table": table}))
    return found if rank else x + table


if __name__ == "__main__":
    right, found = lab.launch(output, 2)
    print(f"sequence 0 gets {found[0, :, 0].tolist()}, and should get {right[0, :, 0].tolist()}")
