"""Zero Bubble x DDP: the split backward calls no hook of DDP, so replicas differ (pytorch 144530)."""

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

import dualpipe_lab as lab


def gradient(rank: int, world_size: int, wrapped: bool) -> torch.Tensor:
    """Return what rank 0 has of its second stage, with DDP or with an all-reduce by hand."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    x = torch.randn(8, 4, dtype=torch.float64).chunk(2)[mesh.get_local_rank("dp")]
    pp, dp = mesh.get_group("pp"), mesh.get_group("dp")
    first = mesh.get_local_rank("pp")
    places = first, first + 2
    modules = [copy.deepcopy(layers[place]) for place in places]
    if wrapped:
        modules = [nn.parallel.DistributedDataParallel(module, process_group=dp) for module in modules]
    pairs = zip(modules, places, strict=True)
    stages = [PipelineStage(module, place, 4, torch.device("cpu"), group=pp) for module, place in pairs]
    schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=nn.functional.mse_loss)
    schedule.step(*([x] if first == 0 else []), **({"target": x} if first else {}))
    found = next(modules[1].parameters()).grad.clone()
    if not wrapped:
        lab.comm.all_reduce(found.div_(2), group=dp)
    return found


if __name__ == "__main__":
    found, right = (lab.launch(gradient, 4, wrapped)[0] for wrapped in (True, False))
    print(f"largest difference {float((found - right).abs().max()):.1e}, of {float(right.abs().max()):.1e}")
