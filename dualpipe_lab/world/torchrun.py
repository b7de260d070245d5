"""`launch` under `torchrun`: this process is one of the ranks, on one machine or on several.

`torchrun --nproc-per-node 4 script.py` starts the script once per rank.  Each `launch` in the script runs its function
on this rank and returns the values of all ranks, so a script works unchanged with and without `torchrun`.
"""

import atexit
import os
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from dualpipe_lab.world import accelerator, context
from dualpipe_lab.world.record.device_clock import clock_of
from dualpipe_lab.world.record.wire import Wire


def is_active() -> bool:
    """Whether `torchrun`, or a launcher that sets the same variables, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def run(
    fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], backend: str, reads_wire: bool = False
) -> list[tuple[Any, ...]]:
    """Run `fn` on this rank; return the value, ledger, trace and status of every rank.

    Raises:
        ValueError: the script's world size is not that of `torchrun`.
    """
    import torch.distributed as dist

    from dualpipe_lab.comm import all_gather_object

    actual = int(os.environ["WORLD_SIZE"])
    if world_size != actual:
        raise ValueError(
            f"torchrun started {actual} ranks, but the script launches {world_size}; "
            f"pass world_size={actual} or --nproc-per-node to match"
        )
    if not dist.is_initialized():
        accelerator.start(backend, accelerator.local_rank())
        dist.init_process_group(accelerator.group_backends(backend))
        atexit.register(_leave)
    dist.barrier()
    wire = Wire(actual) if reads_wire else None
    place, origin_ns = accelerator.device_of_torchrun(), perf_counter_ns()
    present = context.RankContext(dist.get_rank(), actual, clock_of(place, origin_ns), wire=wire, device=place)
    context.install(present)
    try:
        value = fn(present.rank, actual, *(args if place.type == "cpu" else _placed(args, place)))
        present.read_wire()
        mine = (value, present.ledger, present.trace, present.status())
        context.install(
            context.RankContext(present.rank, actual, present.clock, device=place)
        )  # not the user's messages
        return all_gather_object(mine)
    except BaseException:
        atexit.unregister(_leave)  # a message that nobody answers would keep a group's threads, and this process, alive
        raise
    finally:
        context.install(None)
        if wire:
            wire.close()


def _leave() -> None:
    """End the groups' threads before the interpreter ends: a thread that is left then may abort the process."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _placed(args: tuple[Any, ...], device: Any) -> Any:
    from dualpipe_lab.world.placement import place

    return place(args, device)
