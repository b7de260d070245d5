"""The accelerator of a rank: the one module that calls `torch.cuda`, and the place where another one plugs in.

In: `backend="nccl"`, the rank's number on its machine.  Out: a device, events, the name of torch's back end; the
arguments of a launch on the device.  Results need no way back: tensors are rebuilt on the CPU (`payload`).
`DUALPIPE_LAB_ACCELERATOR=package.module` names a module with the attributes of `Cuda`, which then takes the place of
CUDA and NCCL in every rank: for another accelerator, or for a stand-in that tests use.
Elsewhere: `torch.accelerator`; `torch.utils.backend_registration`; `torch.distributed.Backend.register_backend`.
"""

import os
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dualpipe_lab.launch.cluster.environment import cluster

if TYPE_CHECKING:
    import torch

BACKENDS = ("gloo", "nccl")
OVERRIDE = "DUALPIPE_LAB_ACCELERATOR"


class Cuda:
    """CUDA and NCCL: the type of its devices, torch.distributed's name of its back end, and what a rank asks of it."""

    device_type, backend = "cuda", "nccl"

    def obstacle(self, world_size: int) -> str:
        """Reason why NCCL cannot connect `world_size` ranks on this machine; empty if it can."""
        import torch
        import torch.distributed as dist

        if not dist.is_nccl_available():
            return f"NCCL needs {world_size} GPUs, and this build of torch has no NCCL"
        found = torch.cuda.device_count()
        return f"NCCL needs one GPU per rank, {world_size} ranks have {found}" if found < world_size else ""

    def start(self, local_rank: int) -> Any:
        """Make GPU `local_rank` the current device of this process and return it; called before anything else."""
        import torch

        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)

    def synchronize(self) -> None:
        """Block until the current GPU has done what is queued."""
        import torch

        torch.cuda.synchronize()

    def event(self) -> Any:
        """A point of the current stream: `record()` queues it, `elapsed_time(later)` is in milliseconds."""
        import torch

        make: Callable[..., Any] = torch.cuda.Event
        return make(enable_timing=True)

    def rng_state(self, device: Any) -> Any:
        """State of a GPU's random numbers."""
        import torch

        return torch.cuda.get_rng_state(device)

    def set_rng_state(self, state: Any, device: Any) -> None:
        """Set the state of a GPU's random numbers."""
        import torch

        torch.cuda.set_rng_state(state, device)


def current() -> Any:
    """The accelerator behind `backend="nccl"`: CUDA, or the module that `DUALPIPE_LAB_ACCELERATOR` names."""
    name = os.environ.get(OVERRIDE)
    return import_module(name) if name else Cuda()


def start(backend: str, local_rank: int) -> Any:
    """Return the device of a rank, after making it the current one: the CPU, unless the back end is NCCL."""
    import torch

    return current().start(local_rank) if backend == "nccl" else torch.device("cpu")


def group_backends(backend: str) -> str:
    """What `init_process_group` gets: tensors on the CPU always travel over GLOO.

    >>> group_backends("gloo"), group_backends("nccl")
    ('gloo', 'cpu:gloo,cuda:nccl')
    """
    if backend != "nccl":
        return backend
    accelerator = current()
    return f"cpu:gloo,{accelerator.device_type}:{accelerator.backend}"


def device_of_torchrun() -> Any:
    """The device of a rank that `torchrun` started: its GPU if the process group carries tensors of GPUs."""
    import torch
    import torch.distributed as dist

    accelerator = current()
    carried = f"{accelerator.device_type}:{accelerator.backend}" in str(dist.get_backend_config())
    return torch.device(accelerator.device_type, local_rank()) if carried else torch.device("cpu")


def local_rank() -> int:
    """Number of this rank on its machine, as `torchrun` or another starter gives it."""
    started = cluster()
    return 0 if started is None else started.local_rank


def nccl_ready(world_size: int) -> bool:
    """Return whether this machine has a GPU for each of `world_size` ranks; if not, print the reason.

    A cell that needs GPUs starts with `if lab.nccl_ready(2):`; on other machines it prints why it is skipped.
    """
    reason = nccl_obstacle(world_size)
    if reason:
        print(f"skipped: {reason}")
    return not reason


def nccl_obstacle(world_size: int) -> str:
    """Reason why NCCL cannot connect `world_size` ranks on this machine; empty if it can."""
    reason: str = current().obstacle(world_size)
    return reason


def place(value: Any, device: "torch.device") -> Any:
    """Return `value` with every tensor and module in its lists, tuples and dicts on `device`.

    A tensor that occurs twice is one tensor afterwards too; a leaf stays a leaf, a parameter a parameter.  Modules are
    moved in place; other objects are returned as they are, and on the CPU there is nothing to move.
    """
    return value if device.type == "cpu" else _place(value, device, {})


def _place(value: Any, device: "torch.device", placed: dict[int, Any]) -> Any:
    from torch import Tensor, nn

    if isinstance(value, nn.Module):
        return value.to(device)
    if isinstance(value, Tensor):
        if id(value) not in placed:
            placed[id(value)] = _place_tensor(value, device)
        return placed[id(value)]
    if isinstance(value, dict):  # in place: the constructor of an ordered or a default dict may need more
        value.update([(key, _place(part, device, placed)) for key, part in value.items()])
        return value
    if isinstance(value, tuple):
        parts = [_place(part, device, placed) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, list):
        value[:] = [_place(part, device, placed) for part in value]
    return value


def _place_tensor(tensor: "torch.Tensor", device: "torch.device") -> "torch.Tensor":
    from torch import nn

    if tensor.device == device:
        return tensor
    moved = tensor.detach().to(device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(moved, requires_grad=tensor.requires_grad)
    return moved.requires_grad_(tensor.requires_grad)
