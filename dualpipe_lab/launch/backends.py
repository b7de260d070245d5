"""Process group of a launch: GLOO on the loopback interface, and NCCL beside it where every rank has a GPU.

In: rank, world size, backend.  Out: an initialised default process group.  With `backend="nccl"` it has both back ends,
`cpu:gloo,cuda:nccl`, and so has every group made from it: the device of a tensor says which one carries it.
"""

import os
from datetime import timedelta
from pathlib import Path

from dualpipe_lab.launch import accelerator, operating_system

BACKENDS = ("gloo", "nccl")
_LONG = timedelta(days=1)  # the supervisor explains a wait long before GLOO would give up on it


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
    return accelerator.current().obstacle(world_size)


def join(rank: int, world_size: int, backend: str, folder: Path, check: bool) -> None:
    """Initialise the process group through a file store; only GLOO's loopback sockets listen."""
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = operating_system.loopback()
    if check:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    store = dist.FileStore(str(folder / "rendezvous"), world_size)
    names = accelerator.group_backends(backend)
    dist.init_process_group(names, store=store, rank=rank, world_size=world_size, timeout=_LONG)
