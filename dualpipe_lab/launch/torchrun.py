"""`launch` under `torchrun`: this process is one of the ranks, on one machine or on several.

`torchrun --nproc-per-node 4 script.py` starts the script once per rank.  Each `launch` in the script runs its function
on this rank and returns the values of all ranks, so a script works unchanged with and without `torchrun`.
Failures are torchrun's: it ends the ranks of a host when one of them fails, and starts all ranks again where
`--max-restarts` allows.  A collective or message that waits for OPERATION_SECONDS (600), or for `timeout` if that is
less, raises on its rank, on GLOO and on NCCL.  A rank that ends with an exception prints its last operation.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from time import perf_counter_ns
from typing import Any

from dualpipe_lab.launch import accelerator, context
from dualpipe_lab.launch.clock import clock_of
from dualpipe_lab.launch.cluster import join
from dualpipe_lab.launch.cluster.clocks import ClockReading, agree_on_origin, correct, read_clocks
from dualpipe_lab.launch.cluster.environment import Environment, cluster
from dualpipe_lab.launch.folder import sweep
from dualpipe_lab.launch.rank import LaunchConfig
from dualpipe_lab.launch.record.operation import Operation
from dualpipe_lab.launch.record.rank_status import StatusTracker
from dualpipe_lab.launch.record.wire import Wire

_TAG = 2**24 + 1  # of messages about clocks, between the user's
_END = "exchange of results", "(the function has returned)"  # name and label of the last operation


def is_active() -> bool:
    """Whether `torchrun`, or a launcher that sets the same variables, started this process."""
    return cluster() is not None


def check_world(environment: Environment, world_size: int | None) -> int:
    """Return the number of ranks that were started.

    Raises:
        ValueError: the script names another one.
    """
    actual = environment.world_size
    if world_size is not None and world_size != actual:
        raise ValueError(
            f"{environment.starter} started {actual} ranks, but the script launches {world_size}; pass "
            f"world_size={actual}, or None for as many as were started, or start {world_size}"
        )
    return actual


def ignored(config: LaunchConfig, output: str, start: str | None) -> list[str]:
    """Return one sentence for each argument of `launch` that cannot be honoured in a started world."""
    found = []
    if config.link is not None:
        found.append(f"messages take the time of real links here, and link={config.link!r} is ignored")
    if config.clock != "wall":
        found.append(f"ranks have the clocks of their hosts here, and clock={config.clock!r} is ignored")
    if output != "ordered":
        found.append(f"each rank prints for itself here, and output={output!r} is ignored; torchrun has --log-dir")
    if start is not None:
        found.append(f"the ranks have been started already, and start={start!r} is ignored")
    return found


def run(
    fn: Callable[..., Any], environment: Environment, args: tuple[Any, ...], config: LaunchConfig, timeout: float
) -> list[tuple[Any, ...]]:
    """Run `fn` on this rank; return the value, ledger, trace and status of every rank.

    Raises:
        ConnectionError, ValueError: as `join`.
        Exception: what `fn` raised on this rank; from torch, if an operation lost its peer or reached the time limit.
    """
    sweep()
    seconds = min(timeout, join.OPERATION_SECONDS)
    limit = timedelta(seconds=seconds)
    with _settings(config):
        join.join(environment, config.backend, config.check, seconds)
        wire = None
        try:
            wire = Wire(environment.world_size, limit) if config.reads_wire else None
            return _called(fn, args, wire, limit)
        except BaseException as error:
            if isinstance(error, Exception) and (present := context.current):
                sys.stderr.write(last_operation(present.recorder.status) + "\n")
            join.stay()
            raise
        finally:
            context.install(None)
            if wire:
                wire.close()


def last_operation(status: StatusTracker) -> str:
    """Say in a line which operation of `comm` a rank began or waited for last.

    >>> called = Operation("all_reduce", (0, 1, 2, 3), (4,), dtype="float32", sequence=17)
    >>> last_operation(StatusTracker(3, last=called, since=time.perf_counter()))
    'rank 3: last operation: all_reduce shape (4,) float32, number 17 of ranks 0, 1, 2, 3, waited 0.0 s and did not end'
    """
    operation = status.last
    if operation is None:
        return f"rank {status.rank}: last operation: none"
    where = f", number {operation.sequence} of ranks {', '.join(map(str, operation.group))}"
    waited = time.perf_counter() - status.since
    end = "it ended" if operation is status.ended else f"waited {waited:.1f} s and did not end"
    text = operation.describe() + (where if operation.is_collective else "")
    return f"rank {status.rank}: last operation: {text}, {end}"


def _called(
    fn: Callable[..., Any], args: tuple[Any, ...], wire: Wire | None, limit: timedelta
) -> list[tuple[Any, ...]]:
    import torch.distributed as dist

    from dualpipe_lab.comm import all_gather_object

    rank, world_size, place = dist.get_rank(), dist.get_world_size(), accelerator.device_of_torchrun()
    clocks = _Numbers(place)
    first = read_clocks(rank, world_size, clocks, perf_counter_ns)
    origin_ns = agree_on_origin(rank, world_size, clocks, perf_counter_ns, first)
    present = context.RankContext(rank, world_size, clock_of(place, origin_ns), wire=wire, device=place)
    present.read_clock = partial(_gained, rank, world_size, clocks, origin_ns, first)
    readings = [ClockReading(first.time_ns - origin_ns, 0, first.bound_ns)]
    present.time_limit = limit
    context.install(present)
    present.clock.wait_until(0)
    value = fn(rank, world_size, *accelerator.place(args, place))
    status = present.status()
    name, label = _END
    present.recorder.wait_for(Operation(name, present.everyone, (), label=label))
    present.read_wire()
    trace = present.trace
    correct(trace, [*readings, present.gained()])
    mine = (value, present.ledger, trace, status)
    context.install(context.RankContext(rank, world_size, present.clock, device=place))  # not the user's messages
    gathered: list[tuple[Any, ...]] = all_gather_object(mine)
    return gathered


def _gained(rank: int, world_size: int, clocks: "_Numbers", origin_ns: int, first: ClockReading) -> ClockReading:
    """What `RankContext.gained` returns; every rank calls this."""
    reading = read_clocks(rank, world_size, clocks, perf_counter_ns)
    return ClockReading(reading.time_ns - origin_ns, reading.offset_ns - first.offset_ns, reading.bound_ns)


class _Numbers:
    """Whole numbers between two ranks, past `comm`: they are no messages of the user's."""

    def __init__(self, place: Any) -> None:
        import torch
        import torch.distributed as dist

        carries_cpu = place.type == "cpu" or "cpu:" in str(dist.get_backend_config())
        self._tensor = torch.zeros(1, dtype=torch.int64, device="cpu" if carries_cpu else place)

    def send(self, value: int, peer: int) -> None:
        """Send a number to a rank."""
        import torch.distributed as dist

        dist.send(self._tensor.fill_(value), peer, tag=_TAG)

    def recv(self, peer: int) -> int:
        """Return the number that a rank sends."""
        import torch.distributed as dist

        dist.recv(self._tensor, peer, tag=_TAG)
        return int(self._tensor)


@contextmanager
def _settings(config: LaunchConfig) -> Iterator[None]:
    """Set torch's threads and debug level for one launch; the script has its own again afterwards."""
    import torch
    import torch.distributed as dist

    threads, level = torch.get_num_threads(), dist.get_debug_level()
    torch.set_num_threads(config.threads)
    if config.check:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        dist.set_debug_level(level)
