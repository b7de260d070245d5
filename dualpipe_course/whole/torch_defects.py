"""Three defects of torch's own parallel parts, each run on the torch that is installed, beside one process.

Chapter: book/whole/museum.  In: nothing.  Out: by name what a rank has, and what one process has.
`benchmarks/reduced` runs the same functions, and `benchmarks/microscope.py` has them as compositions of larger parts.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isclose

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from dualpipe_lab.launch.launcher import launch

Pairs = dict[str, tuple[Tensor, Tensor]]  # found, of one process


def experts_beside_ddp(rank: int, world_size: int) -> Pairs:
    """Two ranks with a replica of a dense layer and an expert each: DDP averages the replicas' gradients."""
    torch.manual_seed(0)
    tokens, experts = torch.randn(2, 4, 3).double(), torch.randn(2, 3, 3).double()
    dense = nn.Linear(3, 3, bias=False).double()
    one, all_experts = copy.deepcopy(dense), experts.clone().requires_grad_()  # one process
    rows = one(tokens).unflatten(1, (2, 2))  # rank, expert, row, width
    torch.einsum("retw,ewv->retv", rows, all_experts).square().mean().backward()

    expert, replica, group = experts[rank].clone().requires_grad_(), DistributedDataParallel(dense), dist.group.WORLD
    arrived = all_to_all_single_autograd(replica(tokens[rank]), [2, 2], [2, 2], group)
    all_to_all_single_autograd(arrived @ expert, [2, 2], [2, 2], group).square().mean().backward()
    return {"dense layer": (dense.weight.grad, one.weight.grad), "expert": (expert.grad, all_experts.grad[rank])}


def clip_a_pipeline(rank: int, world_size: int) -> Pairs:
    """Each stage of a pipeline clips its own parameters."""
    layers, x = _layers()
    mse_loss(layers(x), x).backward()
    right = clip_grad_norm_(layers.parameters(), inf)
    layers.zero_grad()
    _pipeline(rank, layers)()
    return {f"norm on rank {rank}": (clip_grad_norm_(layers[rank].parameters(), inf), right)}


def accumulate_pipeline_steps(rank: int, world_size: int) -> Pairs:
    """Two steps of four microbatches each, the same ones, are accumulated."""
    layers, x = _layers()
    (right,) = torch.autograd.grad(2 * mse_loss(layers(x), x), layers[rank].weight)
    step = _pipeline(rank, layers)
    step()
    step()
    return {f"stage of rank {rank}": (layers[rank].weight.grad, right)}


def _layers() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), torch.randn(8, 4).double()


def _pipeline(rank: int, layers: nn.Sequential) -> Callable[[], object]:
    """A step of 1F1B on two ranks, with four microbatches."""
    stage = PipelineStage(layers[rank], rank, 2, torch.device("cpu"), group=dist.group.WORLD)
    schedule, x = Schedule1F1B(stage, 4, loss_fn=mse_loss), _layers()[1]
    return lambda: schedule.step(*([] if rank else [x]), **({"target": x} if rank else {}))


@dataclass(frozen=True)
class TorchDefect:
    """A function that has the defect, what was reported of it, and where; the threads were read in November 2026."""

    run: Callable[[int, int], Pairs]
    told: str
    source: str

    def quotients(self) -> dict[str, float]:
        """Run it on two ranks: by name, the norm of what was found over that of one process."""
        found = {name: pair for pairs in launch(self.run, 2) for name, pair in pairs.items()}
        return {name: float(ours.norm() / right.norm()) for name, (ours, right) in found.items()}

    def look(self) -> str:
        """Run it, and say what differs on this torch."""
        found = self.quotients()
        ended = all(isclose(quotient, 1, rel_tol=1e-6) for quotient in found.values())
        lines = [f"{name:15}{quotient:8.4g} times that of one process" for name, quotient in found.items()]
        return "\n".join([f"torch {torch.__version__}", *lines, *["this torch has the defect no longer"] * ended])

    def answer(self) -> str:
        """What runs, and the report."""
        return f"{inspect.getsource(self.run)}\n{self.told}\n{SEEN}\n\nhttps://github.com/{self.source}"


SEEN = "Measured in torch 2.10.0, 2.11.0, 2.12.0, 2.13.0, 2.14.1 and 2.15.0: it has ended in none of them."
TORCH_DEFECTS = (
    TorchDefect(
        experts_beside_ddp,
        "Through the all-to-all an expert gets the gradients of all ranks' tokens, a sum of two means. DDP divides\n"
        "its replicas' sums by 2; nothing divides this one. The reporter's loss curves agreed. The thread is open.",
        "pytorch/pytorch/issues/160285",
    ),
    TorchDefect(
        clip_a_pipeline,
        "clip_grad_norm_ knows nothing of the other stages: each rank clips by another factor. torchtitan sums the\n"
        "squares over the pipeline itself since 2024 (pull request 649); torch leaves it to the user.",
        "pytorch/torchtitan/issues/596",
    ),
    TorchDefect(
        accumulate_pipeline_steps,
        "At its end a step divides all that is in .grad by its 4 microbatches, also what an earlier step left:\n"
        "(1 + 1/4) / 2. torchtitan passes scale_grads=False since 2025 (pull request 1732); torch's default is True.",
        "pytorch/torchtitan/issues/1733",
    ),
)
