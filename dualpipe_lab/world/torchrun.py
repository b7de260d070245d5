"""`launch` under `torchrun`, Slurm or Kubernetes: this process is one of the ranks, on one machine or on several.

`torchrun --nproc-per-node 4 script.py` starts the script once per rank.  Each `launch` in the script runs its function
on this rank and returns the values of all ranks, so a script works unchanged with and without `torchrun`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter_ns
from typing import Any

from dualpipe_lab.world import accelerator, context
from dualpipe_lab.world.cluster import join, watchdog
from dualpipe_lab.world.cluster.clocks import Alignment, Reading, agree_on_origin, read_clocks
from dualpipe_lab.world.cluster.environment import Environment, cluster
from dualpipe_lab.world.config import LaunchConfig
from dualpipe_lab.world.folder import sweep
from dualpipe_lab.world.record.device_clock import clock_of
from dualpipe_lab.world.record.wire import Wire

_TAG = 2**24 + 1  # of messages about clocks, between the user's


def is_active() -> bool:
    """Whether `torchrun`, Slurm or Kubernetes, or a launcher that sets the same variables, started this process."""
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
    """What the arguments of `launch` ask for that nobody can do here, each as a sentence."""
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
        RankError, RankTimeout: as `watchdog.watching`, on every rank that lives.
    """
    sweep()
    with _settings(config):
        join.join(environment, config.backend, config.check, timeout)
        wire = None
        try:
            with watchdog.watching(join.store(), environment, timeout) as watch:
                wire = Wire(environment.world_size) if config.reads_wire else None
                return _called(fn, args, wire, watch)
        except BaseException:
            join.stay()
            raise
        finally:
            context.install(None)
            if wire:
                wire.close()


def _called(
    fn: Callable[..., Any], args: tuple[Any, ...], wire: Wire | None, watch: watchdog.Watchdog
) -> list[tuple[Any, ...]]:
    """Call the function in a context of its own and gather what the ranks return."""
    import torch.distributed as dist

    from dualpipe_lab.comm import all_gather_object

    rank, world_size, place = dist.get_rank(), dist.get_world_size(), accelerator.device_of_torchrun()
    clocks = _Numbers(place)
    first = read_clocks(rank, world_size, clocks, perf_counter_ns)
    origin_ns = agree_on_origin(rank, world_size, clocks, perf_counter_ns, first)
    present = context.RankContext(rank, world_size, clock_of(place, origin_ns), log=watch.log, wire=wire, device=place)
    present.read_clock = partial(_gained, rank, world_size, clocks, origin_ns, first)
    context.install(present)
    present.clock.wait_until(0)
    value = fn(rank, world_size, *(args if place.type == "cpu" else _placed(args, place)))
    watch.returned()
    present.read_wire()
    trace = present.trace
    Alignment(first, read_clocks(rank, world_size, clocks, perf_counter_ns)).correct(trace, origin_ns)
    mine = (value, present.ledger, trace, present.status())
    context.install(context.RankContext(rank, world_size, present.clock, device=place))  # not the user's messages
    gathered: list[tuple[Any, ...]] = all_gather_object(mine)
    return gathered


def _gained(rank: int, world_size: int, clocks: "_Numbers", origin_ns: int, first: Reading) -> tuple[int, int, int]:
    """What `RankContext.gained` returns; every rank calls this."""
    reading = read_clocks(rank, world_size, clocks, perf_counter_ns)
    return reading.time_ns - origin_ns, reading.offset_ns - first.offset_ns, reading.bound_ns


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


def _placed(args: tuple[Any, ...], device: Any) -> Any:
    from dualpipe_lab.world.placement import place

    return place(args, device)
