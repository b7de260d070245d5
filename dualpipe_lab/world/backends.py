"""Process group of a launch: GLOO on the loopback interface, or NCCL where every rank has a GPU.

In: rank, world size, backend.  Out: an initialised default process group.
"""

import os
import socket
from datetime import timedelta
from pathlib import Path

BACKENDS = ("gloo", "nccl")
_LONG = timedelta(days=1)  # the watchdog explains a wait long before GLOO would give up on it


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
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return f"NCCL needs {world_size} GPUs, and this build of torch has no NCCL"
    found = torch.cuda.device_count()
    return f"NCCL needs one GPU per rank, {world_size} ranks have {found}" if found < world_size else ""


def join(rank: int, world_size: int, backend: str, folder: Path, check: bool) -> None:
    """Initialise the process group through a file store; only GLOO's loopback sockets listen."""
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    if check:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "rendezvous"), world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_LONG)


def loopback() -> str:
    """Name of the loopback interface: `lo` on Linux, `lo0` on macOS."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")
