"""The process of a rank: receive a job, join the process group, run the user's function, return its value.

rank:    hello -> (job) -> ready -> (go) -> result or failure -> killed
"""

import contextlib
import faulthandler
import io
import os
import random
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from dualpipe_lab._private import release_fork_server
from dualpipe_lab.launch import accelerator, context, operating_system, payload
from dualpipe_lab.launch.clock import ClockName, VirtualClock, clock_of
from dualpipe_lab.launch.emulator import Emulator, Link, NodeLink, Timestamps
from dualpipe_lab.launch.modes import Modes, under
from dualpipe_lab.launch.record.operation import open_log
from dualpipe_lab.launch.record.rank_status import StackFrame, StatusTracker
from dualpipe_lab.launch.record.wire import Wire
from dualpipe_lab.launch.record.wire import obstacle as wire_obstacle

_LONG = timedelta(days=1)  # the supervisor explains a wait long before GLOO would give up on it


@dataclass(frozen=True)
class LaunchConfig:
    """Arguments of `launch` that apply on every rank; `launch` documents them."""

    threads: int
    link: Link | NodeLink | None
    clock: ClockName
    check: bool
    backend: str
    wire: bool

    @property
    def is_emulated(self) -> bool:
        """Whether messages carry timestamps."""
        return self.link is not None or self.clock == "virtual"

    @property
    def reads_wire(self) -> bool:
        """Whether this launch counts the bytes on the wire."""
        return self.wire and not wire_obstacle(self.backend)

    def validate(self, world_size: int) -> None:
        """Raise ValueError for a value that no rank could use."""
        if type(self.threads) is not int or self.threads < 1:
            raise ValueError(f"launch needs threads to be a whole number from 1, got {self.threads!r}")
        if self.link is not None and not isinstance(self.link, (Link, NodeLink)):
            raise ValueError(
                f"launch needs link to be a Link, such as lab.Link(gbps=1, latency_ms=1), got {self.link!r}"
            )
        if self.clock not in ("wall", "virtual"):
            raise ValueError(f"launch knows clock=wall, virtual, got {self.clock!r}")
        if self.backend not in accelerator.BACKENDS:
            raise ValueError(f"launch knows backend={', '.join(accelerator.BACKENDS)}, got {self.backend!r}")
        if self.backend == "nccl" and self.is_emulated:
            asked = f"link={self.link!r}" if self.link is not None else f"clock={self.clock!r}"
            raise ValueError(
                f"NCCL's messages take the time that its links take, and {asked} emulates another; "
                "leave it out, or use backend='gloo'"
            )
        if self.backend == "nccl" and (obstacle := accelerator.nccl_obstacle(world_size)):
            raise ValueError(
                f"{obstacle}; use backend='gloo', or guard the cell with `if lab.nccl_ready({world_size}):`"
            )


@dataclass(frozen=True)
class Job:
    """One call for one rank; `call` is the pickled `(fn, args)`, or the file that holds it."""

    rank: int
    world_size: int
    call: bytes | Path
    sources: dict[str, list[str]]
    folder: Path
    environment: dict[str, str]
    directory: str
    search_path: list[str]
    config: LaunchConfig
    seed: int
    modes: Modes | None


def rank_main(channel: "Connection[Any, Any]", out: "Connection[Any, Any]", err: "Connection[Any, Any]") -> None:
    """Serve one job; the launcher kills this process behind it, or is gone."""
    _detach(out, err)
    launcher = _Channel(channel)
    launcher.send("hello")
    job: Job = launcher.receive()
    launcher.rank = job.rank
    try:
        _serve(job, launcher)
    finally:
        _flush()
    launcher.receive()  # nothing comes: the other ranks may still need this one's connections


def spawned_rank(index: int, ends: "tuple[tuple[Connection[Any, Any], ...], ...]") -> None:
    """Serve a job as process `index` of `torch.multiprocessing.spawn`, which hands every process the ends of all."""
    for other, connections in enumerate(ends):
        if other != index:
            for connection in connections:
                connection.close()  # held open here, the end of that rank would go unnoticed
    rank_main(*ends[index])


class _Channel:
    """The rank's end of the pipe to the launcher; a thread reads it and answers requests for the status."""

    def __init__(self, channel: "Connection[Any, Any]") -> None:
        self._channel = channel
        self.rank = -1  # until there is a job
        self._lock = threading.Lock()
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._listen, name="dualpipe-lab", daemon=True).start()

    def send(self, kind: str, *content: Any) -> None:
        with self._lock:
            self._channel.send((kind, *content))

    def receive(self) -> Any:
        return self._inbox.get()

    def _listen(self) -> None:
        try:
            while True:
                kind, *content = self._channel.recv()
                if kind == "where":
                    self.send("where", rank_status(self.rank))
                else:
                    self._inbox.put(content[0] if content else None)
        except (EOFError, OSError):
            os.killpg(os.getpgrp(), signal.SIGKILL)  # the launcher is gone: no process of this rank may survive it


def rank_status(rank: int) -> Any:
    """Status of this process, also before it has a context."""
    present = context.current
    return present.status() if present else StatusTracker(rank).snapshot()


def _serve(job: Job, launcher: _Channel) -> None:
    try:
        device, (fn, args) = _prepare(job)
        _join(job)
        wire = Wire(job.world_size) if job.config.reads_wire else None
    except BaseException as error:
        return launcher.send("failure", *_describe(error), rank_status(job.rank))
    launcher.send("ready")
    present = _make_context(job, wire, device, origin_ns=launcher.receive())
    context.install(present)
    present.clock.wait_until(0)
    try:
        args = accelerator.place(args, device)
        with under(job.modes):
            value = fn(job.rank, job.world_size, *args)
        present.read_wire()
        _flush()
        result = _packed(fn, value, present)
    except BaseException as error:
        _flush()
        return launcher.send("failure", *_describe(error), rank_status(job.rank))
    return launcher.send("result", result, rank_status(job.rank))


def _packed(fn: Any, value: Any, present: context.RankContext) -> bytes:
    """Pickle the value, ledger, trace and status for the launcher.

    Raises:
        TypeError: if the value cannot travel.
    """
    try:
        return payload.dumps((value, present.ledger, present.trace, rank_status(present.rank)))
    except Exception as error:
        name = getattr(fn, "__name__", "the function")
        raise TypeError(
            f"{name} returned a {type(value).__name__} that cannot travel back ({error}); "
            "return numbers, tensors, lists or dicts of them"
        ) from None


def _prepare(job: Job) -> tuple[Any, Any]:
    """Set up environment, random numbers, threads, tracebacks and device; return the device and the call."""
    os.environ.clear()
    os.environ.update(job.environment)
    os.chdir(job.directory)
    sys.path[:] = job.search_path
    stacks = open(job.folder / f"stack-{job.rank}", "w")  # noqa: SIM115  faulthandler writes to it until the end
    faulthandler.enable(stacks)
    if operating_system.STACK_SIGNAL is not None:
        faulthandler.register(operating_system.STACK_SIGNAL, stacks)
    payload.install_sources(job.sources)
    import torch

    torch.set_num_threads(job.config.threads)
    random.seed(job.seed)  # forked ranks would all draw the server's numbers
    torch.manual_seed(job.seed)
    if "numpy" in sys.modules:  # by torch, at the latest; its random numbers come when they are first used
        from numpy import random as numpy_random

        numpy_random.seed(job.seed % 2**32)
    device = accelerator.start(job.config.backend, job.rank)
    return device, payload.loads(job.call.read_bytes() if isinstance(job.call, Path) else job.call)


def _join(job: Job) -> None:
    """Make the process group through a file store; only GLOO's loopback sockets listen.

    With `backend="nccl"` the group has both back ends, `cpu:gloo,cuda:nccl`, and so has every group made from it: the
    device of a tensor says which one carries it.
    """
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = operating_system.loopback()
    if job.config.check:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    store = dist.FileStore(str(job.folder / "rendezvous"), job.world_size)
    names = accelerator.group_backends(job.config.backend)
    dist.init_process_group(names, store=store, rank=job.rank, world_size=job.world_size, timeout=_LONG)


def _make_context(job: Job, wire: Wire | None, device: Any, origin_ns: int) -> context.RankContext:
    config = job.config
    clock = VirtualClock() if config.clock == "virtual" else clock_of(device, origin_ns)
    timestamps = Timestamps(job.folder, job.rank) if config.is_emulated else None
    emulator = None if timestamps is None else Emulator(job.rank, clock, config.link, timestamps)
    log = open_log(job.folder / f"operations-{job.rank}")
    return context.RankContext(job.rank, job.world_size, clock, emulator, log, wire, device)


def _describe(error: BaseException) -> tuple[str, list[StackFrame], str, bytes | None]:
    if isinstance(error, SystemExit):
        cause = f"left with sys.exit({error.code!r})"
    else:
        cause = "raised " + "".join(traceback.format_exception_only(error)).strip()
    own = error.__traceback__.tb_next if error.__traceback__ else None  # the first frame is this file
    lines = (item for item in traceback.extract_tb(own) if item.filename != __file__)
    frames = [StackFrame(item.filename, item.lineno or 0, item.name) for item in lines]
    text = "".join(traceback.format_exception(type(error), error, own))
    try:
        travels = payload.dumps(error)
        payload.loads(travels)
    except Exception:
        return cause, frames, text, None
    return cause, frames, text, travels


def _detach(out: "Connection[Any, Any]", err: "Connection[Any, Any]") -> None:
    """Detach from the terminal: a new process group, pipes for the output, no interrupts, exit with the fork server."""
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent and parent.pid != os.getppid():
        _die_with_the_fork_server()
    for connection, number in ((out, 1), (err, 2)):
        os.dup2(connection.fileno(), number)
        connection.close()
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), "utf-8", "replace", line_buffering=True)  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), "utf-8", "replace", line_buffering=True)  # noqa: SIM115


def _die_with_the_fork_server() -> None:
    """The server ends with the kernel, and this rank with the server, even while it holds the interpreter's lock."""
    inherited = release_fork_server()
    if inherited is not None:  # as long as a rank keeps it open, the server lives
        os.close(inherited)
    operating_system.die_with_parent()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):  # the learner may have closed it
            stream.flush()
