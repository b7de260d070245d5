"""`launch`: run a function of a notebook on new rank processes and return its values.

Chapter: book/start/ranks-and-messages.  In: a function and a number of ranks.  Out: one value per rank.
Elsewhere: `torch.multiprocessing.spawn` (importable functions, no values, seconds per launch), `torchrun` (scripts).
Under `torchrun` the same call runs the function on this rank and gathers the values of all.
"""

import multiprocessing
import os
import secrets
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any, get_args

from dualpipe_lab.launch import context, payload, server, torchrun
from dualpipe_lab.launch.clock import ClockName
from dualpipe_lab.launch.cluster.environment import Environment, cluster
from dualpipe_lab.launch.emulator import Link, NodeLink
from dualpipe_lab.launch.folder import private_folder
from dualpipe_lab.launch.modes import modes_of_caller
from dualpipe_lab.launch.rank import Job, LaunchConfig
from dualpipe_lab.launch.record.ledger import Ledger
from dualpipe_lab.launch.record.trace import clock_note, match, to_timeline
from dualpipe_lab.launch.record.wire import obstacle as wire_obstacle
from dualpipe_lab.launch.server import StartMethod
from dualpipe_lab.launch.supervise.diagnosis import disagreements
from dualpipe_lab.launch.supervise.errors import RankError, RankFailure, StartupError
from dualpipe_lab.launch.supervise.output import MODES, Output, OutputMode
from dualpipe_lab.launch.supervise.supervisor import Supervisor
from dualpipe_lab.timeline import COMMUNICATION, Span, Timeline

MAX_RANKS = 128  # 20 MB each


class Results(list[Any]):
    """The return values of the ranks, in rank order.

    Attributes:
        ledger: calls, bytes and peers of each rank, by operation.
        timeline: spans of computation and waiting, and the messages between ranks.
        collectives: by rank, one span per collective from its start to its end, also while the rank computes.
        output: the standard output of each rank, one string per rank.
        clock_note: how far times of two ranks may be off, as the timeline's name says it; empty on one machine.
    """

    ledger: Ledger
    timeline: Timeline
    collectives: list[list[Span]]
    output: list[str]
    clock_note: str

    @property
    def streams(self) -> Timeline:
        """The timeline with each rank's collectives on a second stream, "communication"."""
        return self.timeline.with_stream(COMMUNICATION, self.collectives)


def launch(
    fn: Callable[..., Any],
    world_size: int | None,
    *args: Any,
    timeout: float = 30,
    output: OutputMode = "ordered",
    threads: int = 1,
    link: Link | NodeLink | None = None,
    clock: ClockName = "wall",
    check: bool = False,
    backend: str = "gloo",
    wire: bool = False,
    start: StartMethod | None = None,
) -> Results:
    """Run `fn(rank, world_size, *args)` on `world_size` new processes that form one process group.

    Every rank draws other random numbers: `torch`, `numpy.random` and `random` are seeded with the rank's number plus
    one draw from the caller's torch generator, as `DataLoader` seeds its workers, so `torch.manual_seed(0)` before
    `launch` makes a run repeatable; under `torchrun` each process keeps the generators of its script.
    The function computes under the caller's global modes of torch, such as the default dtype, `no_grad` or autocast.

    Args:
        fn: the function; it may be defined in a cell, and gets copies of the notebook's or script's variables that its
            code names, and no others: `globals()` and a name in a string find those alone.
        world_size: number of ranks; None for as many as `torchrun` has started.
        args: further arguments of `fn`, the same on every rank; tensors and modules in them, also nested in lists,
            tuples and dicts, arrive on the rank's device.
        timeout: seconds after which the launcher asks the ranks for their status and stops them; under `torchrun` the
            seconds after which one operation fails, at most 600.
        output: `ordered` (rank 0 live, then the rest), `live` (interleaved, prefixed) or `collect` (not printed).
        threads: threads of each rank's tensor operations.
        link: emulated link that delays messages; a `NodeLink` has two speeds.
        clock: `wall` (real seconds) or `virtual` (model time, the same on every machine).
        check: torch compares every collective across the ranks before it runs; slower.
        backend: `gloo`, or `nccl` where every rank has a GPU: tensors on GPUs travel over NCCL then, those on the CPU
            over GLOO, and no link or virtual clock is emulated.
        wire: count the bytes that leave each rank's sockets (Linux and GLOO); connecting takes longer.
        start: `forkserver`, or `spawn` for `torch.multiprocessing.spawn`, seconds slower; None takes the quicker one.

    Returns:
        The values in rank order, their tensors on the CPU, with `.ledger`, `.timeline` and `.output`.

    Raises:
        RankError: a rank raised, died or exited; the message has the rank, the line of code and the cause.
        RankTimeout: the ranks are in a deadlock, or `timeout` passed.
        TypeError, ValueError, RuntimeError: for bad arguments, before any process starts.
        Exception: under `torchrun`, what `fn` or torch raised on this rank, which prints its last operation.
    """
    __tracebackhide__ = True
    config, started = LaunchConfig(threads, link, clock, check, backend, wire), cluster()
    world_size = _size(world_size, started)
    _check(timeout, output, start)
    config.validate(world_size if started is None else started.local_rank + 1)  # each node has GPUs for its own ranks
    payload.check_call(fn, world_size, args)
    if context.current is not None:
        raise RuntimeError("launch was called inside a rank; ranks cannot launch ranks, call fn directly")
    if started is not None:
        if started.rank == 0:
            for sentence in torchrun.ignored(config, output, start):
                warnings.warn(sentence, stacklevel=2)
        return _gathered(torchrun.run(fn, started, args, config, timeout), "wall", fn, config)
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            "launch was called in a daemonic process, such as a worker of multiprocessing.Pool or DataLoader, and "
            "Python allows it no children; use concurrent.futures.ProcessPoolExecutor or Process(daemon=False)"
        )
    with private_folder() as folder:
        pickled, texts = _run(_make_jobs(fn, world_size, args, config, folder), output, timeout, start)
    results = _gathered([_rebuilt(rank, data, world_size) for rank, data in enumerate(pickled)], clock, fn, config)
    results.output = texts
    return results


def _size(world_size: int | None, started: Environment | None) -> int:
    if world_size is None and started is None:
        raise ValueError(
            "launch takes the world as it is with world_size=None, where torchrun has started the ranks, and nobody "
            "has; give a number of ranks, or start the script with torchrun"
        )
    if world_size is not None:
        _check_size(world_size, is_limited=started is None)
    if started is not None:
        return torchrun.check_world(started, world_size)
    assert world_size is not None
    return world_size


def _check_size(world_size: object, is_limited: bool) -> None:
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"launch needs world_size to be a whole number from 1, got {world_size!r}")
    if is_limited and world_size > MAX_RANKS:
        raise ValueError(
            f"launch starts real processes, {MAX_RANKS} at most, got world_size={world_size}; use simulate"
        )


def _check(timeout: float, output: str, start: str | None) -> None:
    if not isinstance(timeout, Real) or not timeout > 0:
        raise ValueError(f"launch needs timeout > 0 seconds, got {timeout!r}")
    if output not in MODES:
        raise ValueError(f"launch knows output={', '.join(MODES)}, got {output!r}")
    if start is not None and start not in get_args(StartMethod):
        raise ValueError(f"launch knows start={', '.join(get_args(StartMethod))}, got {start!r}")


def _make_jobs(
    fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], config: LaunchConfig, folder: Path
) -> list[Job]:
    call = payload.spool(payload.pack_call(fn, args), folder, fn, args)
    sources, environment = payload.cell_sources(), dict(os.environ)
    directory, search_path, seed, modes = os.getcwd(), list(sys.path), _draw_seed(), modes_of_caller()
    return [
        Job(rank, world_size, call, sources, folder, environment, directory, search_path, config, seed + rank, modes)
        for rank in range(world_size)
    ]


def _draw_seed() -> int:
    """Draw 63 bits from torch's generator; a caller who has not imported torch has not seeded it either."""
    if "torch" not in sys.modules:
        return secrets.randbits(63)
    import torch

    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def _run(jobs: list[Job], mode: OutputMode, timeout: float, start: StartMethod | None) -> tuple[list[bytes], list[str]]:
    """Run the jobs; if the processes themselves do not start, renew the fork server once, then do without it."""
    __tracebackhide__ = True
    for recover in (server.restart_fork_server, server.fall_back):
        try:
            return _attempt(jobs, mode, timeout, start)
        except StartupError:
            if start == "spawn":
                raise
            with suppress(OSError):  # a server that cannot be renewed fails at the next attempt, which then spawns
                recover()
    return _attempt(jobs, mode, timeout, None)


def _attempt(
    jobs: list[Job], mode: OutputMode, timeout: float, start: StartMethod | None
) -> tuple[list[bytes], list[str]]:
    __tracebackhide__ = True
    output = Output(len(jobs), mode)
    processes: list[server.RankProcess] = []
    supervisor = None
    try:
        with server.interrupts_held():  # an interrupt may come at any line, but none must lose a process
            processes = server.start(len(jobs), start)
            supervisor = Supervisor(jobs, processes, output, timeout)
        pickled = supervisor.run()
    finally:
        with server.interrupts_held():
            if supervisor:
                supervisor.close()
            server.retire(processes)
    return pickled, output.texts()


def _rebuilt(rank: int, data: bytes, world_size: int) -> tuple[Any, ...]:
    __tracebackhide__ = True
    try:
        parts: tuple[Any, ...] = payload.loads(data)
    except Exception as error:
        cause = f"returned a value that cannot be rebuilt here ({type(error).__name__}: {error})"
        raise RankError({rank: RankFailure(rank, cause)}, world_size) from error
    return parts


def _gathered(parts: list[tuple[Any, ...]], clock: ClockName, fn: Callable[..., Any], config: LaunchConfig) -> Results:
    __tracebackhide__ = True
    values, ledgers, traces, statuses = zip(*parts, strict=True)
    matching = match(list(traces))
    wrong = disagreements(dict(enumerate(statuses))) or matching.misfits
    if wrong:
        raise RankError({rank: RankFailure(rank, cause) for rank, cause in wrong.items()}, len(parts))
    if matching.lost:
        first, number = matching.lost[0], len(matching.lost)
        warnings.warn(f"{first}, which never received it ({number} lost in all)", stacklevel=3)
    if matching.early_ns:
        warnings.warn(
            f"a message came {matching.early_ns / 1e6:.3f} ms before it was sent, beyond the bounds of the ranks' "
            "clocks: a clock was set, or changed its rate, during the launch",
            stacklevel=3,
        )
    results = Results(values)
    results.ledger = Ledger(list(ledgers), config.wire, wire_obstacle(config.backend))
    results.timeline = to_timeline(list(traces), matching.messages, clock, getattr(fn, "__name__", "launch"))
    results.collectives = [sorted(trace.collectives, key=lambda span: span.start) for trace in traces]
    results.output, results.clock_note = [], clock_note(list(traces))
    return results
