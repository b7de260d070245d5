"""Joining the ranks into a process group: GLOO on loopback, or NCCL where every rank has a GPU."""

import os
import socket
from datetime import timedelta
from pathlib import Path

BACKENDS = ("gloo", "nccl")
_LONG = timedelta(days=1)  # the watchdog explains a wait long before GLOO would give up on it


def nccl_ready(world_size: int) -> bool:
    """Whether this machine has a GPU for each of `world_size` ranks; prints why not.

    A cell for GPU owners starts with `if lab.nccl_ready(2):`, so that it says why it is skipped elsewhere.
    """
    reason = nccl_obstacle(world_size)
    if reason:
        print(f"skipped: {reason}")
    return not reason


def nccl_obstacle(world_size: int) -> str:
    """Why NCCL cannot connect `world_size` ranks here; empty if it can."""
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return f"NCCL needs {world_size} GPUs, and this build of torch has no NCCL"
    found = torch.cuda.device_count()
    return f"NCCL needs one GPU per rank, {world_size} ranks have {found}" if found < world_size else ""


def join(rank: int, world_size: int, backend: str, folder: Path, check: bool) -> None:
    """Connect this rank to the others through a file; nothing listens but GLOO's pairs on loopback."""
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
