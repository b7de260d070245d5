"""The context of a rank: its number, its clock, its recorder and its emulated link.

It is the one piece of state that belongs to the process: `launch` makes it in every rank, elsewhere the first use does.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from mmap import mmap
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from dualpipe_lab.launch import accelerator
from dualpipe_lab.launch.clock import Clock, DeviceClock, clock_of
from dualpipe_lab.launch.cluster.clocks import ClockReading
from dualpipe_lab.launch.emulator import Emulator
from dualpipe_lab.launch.record.ledger import RankLedger
from dualpipe_lab.launch.record.rank_status import RankStatus
from dualpipe_lab.launch.record.recorder import Recorder
from dualpipe_lab.launch.record.trace import RankTrace
from dualpipe_lab.launch.record.wire import Wire
from dualpipe_lab.timeline import Span
from dualpipe_lab.timeline.spans import ActionKey

if TYPE_CHECKING:
    import torch


class RankContext:
    """State of one rank.

    Attributes:
        rank, world_size: number of this rank, number of ranks.
        everyone: all ranks of the world, in order.
        clock: wall clock or virtual clock.
        recorder: ledger, trace and status of this rank.
        active_recorder: the recorder; None in a script that made its process group itself: `comm` records nothing.
        wire: counts the bytes that leave the sockets; None unless `launch(..., wire=True)`.
        device: where the tensors of this rank live.
        time_limit: of an operation, for the groups that are made later; None for torch's own.
        groups: this rank's group of those that a mesh has made, by the ranks of all of them.
        read_clock: how this rank reads its clock beside rank 0's, see `gained`; None where all ranks have one clock.
        in_flight: works without a completed `wait`; a work that is garbage-collected would lose its message.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        clock: Clock,
        emulator: Emulator | None = None,
        log: mmap | None = None,
        wire: Wire | None = None,
        device: "torch.device | None" = None,
        records: bool = True,
    ) -> None:
        self.rank, self.world_size, self.clock = rank, world_size, clock
        self.wire, self._device = wire, device
        self.everyone = tuple(range(world_size))
        self.recorder = Recorder(rank, clock, emulator, log)
        self.active_recorder = self.recorder if records else None
        self.in_flight: dict[int, object] = {}
        self.time_limit: timedelta | None = None
        self.groups: dict[tuple[tuple[int, ...], ...], torch.distributed.ProcessGroup] = {}
        self.read_clock: Callable[[], ClockReading] | None = None

    @property
    def ledger(self) -> RankLedger:
        """Messages and collectives of this rank so far; with a warning where nothing is recorded."""
        if self.active_recorder is None:
            warnings.warn(
                "the ledger stays empty: this script made its process group itself, so comm records nothing; "
                "run its function with launch(fn, world_size)",
                stacklevel=2,
            )
        return self.recorder.flush().ledger

    @property
    def trace(self) -> RankTrace:
        """Spans, messages and collectives of this rank so far, with their times."""
        trace = self.recorder.flush().trace
        if isinstance(self.clock, DeviceClock):
            trace.move(self.clock.event_times())
        return trace

    @property
    def device(self) -> "torch.device":
        """The device of this rank's tensors: under NCCL the GPU of its local rank, otherwise the CPU."""
        if self._device is None:
            import torch

            self._device = torch.device("cpu")
        return self._device

    def gained(self) -> ClockReading:
        """Time of this clock, what rank 0's has gained on it since the start, bound of that; every rank calls this."""
        return ClockReading(self.clock.now(), 0, 0) if self.read_clock is None else self.read_clock()

    def read_wire(self) -> None:
        """Enter the bytes that left the sockets into the ledger; every rank calls this after its last operation."""
        if self.wire is not None:
            import torch.distributed as dist

            dist.barrier()
            self.ledger.enter_wire(self.wire.sent())

    def status(self) -> RankStatus:
        """Status of this rank's main thread; another thread calls this."""
        return self.recorder.flush().status.snapshot()

    def span(
        self,
        kind: str,
        stage: int | None = None,
        microbatch: int | None = None,
        label: str = "",
        pair: tuple[ActionKey, ActionKey] | None = None,
    ) -> AbstractContextManager[None]:
        """Record the `with` block as one span of the timeline; the arguments are those of `Span`."""
        return _OpenSpan(self, (kind, stage, microbatch, label, pair))

    def compute(self, ms: float, label: str = "") -> None:
        """Let `ms` milliseconds of this rank's clock pass."""
        start = self.clock.now()
        self.clock.wait_until(start + round(ms * 1_000_000))
        end = self.clock.now()
        if not self.recorder.open_spans and end > start:
            self.recorder.keep(Span(self.rank, start, end, "compute", label=label))


class _OpenSpan(AbstractContextManager[None]):
    """A span that has begun; a generator would take three times the calls, twice per action of a pipeline."""

    def __init__(self, context: RankContext, title: tuple[Any, ...]) -> None:
        self._context, self._title = context, title

    def __enter__(self) -> None:
        self._start = self._context.clock.now()
        self._context.recorder.open_spans += 1

    def __exit__(self, *_: object) -> None:
        context = self._context
        context.recorder.open_spans -= 1
        context.recorder.keep(Span(context.rank, self._start, context.clock.now(), *self._title))


current: RankContext | None = None  # of this process; None outside of a rank


def install(context: RankContext | None) -> None:
    """Make `context` the context of this process."""
    global current  # the documented exception: one rank, one process, one context
    current = context


def rank_context() -> RankContext:
    """The context of this rank.

    Raises:
        RuntimeError: outside of a rank.
    """
    if current is None:
        import torch.distributed as dist

        if not dist.is_initialized():
            raise RuntimeError("no rank here: call this inside the function that launch(fn, world_size) runs")
        place, origin_ns = accelerator.device_of_torchrun(), perf_counter_ns()
        clock = clock_of(place, origin_ns)
        install(RankContext(dist.get_rank(), dist.get_world_size(), clock, device=place, records=False))
    assert current is not None
    return current


def device() -> "torch.device":
    """The device of this rank: `cuda:<number on this machine>` with `backend="nccl"`, `cpu` otherwise and outside."""
    import torch
    import torch.distributed as dist

    in_rank = current is not None or (dist.is_available() and dist.is_initialized())
    return rank_context().device if in_rank else torch.device("cpu")


def compute(ms: float, label: str = "") -> None:
    """Emulate `ms` milliseconds of computation: sleep on the wall clock, add to the virtual clock.

    Sleeping ranks share a core without delaying each other, as ranks on separate devices would.

    Raises:
        RuntimeError: outside of a rank.
        ValueError: if `ms` is negative.
    """
    if ms < 0:
        raise ValueError(f"work takes no less than 0 ms, got {ms}")
    rank_context().compute(ms, label)


def now() -> int:
    """Nanoseconds of this rank's clock since all ranks started; on a GPU, after the work that is queued there.

    Raises:
        RuntimeError: outside of a rank.
    """
    clock = rank_context().clock
    return clock.after_device() if isinstance(clock, DeviceClock) else clock.now()


def span(
    kind: str, stage: int | None = None, microbatch: int | None = None, label: str = ""
) -> AbstractContextManager[None]:
    """Record the `with` block as a span of the timeline: `with lab.span("F", stage=0, microbatch=2):`.

    Raises:
        RuntimeError: outside of a rank.
    """
    return rank_context().span(kind, stage, microbatch, label)
