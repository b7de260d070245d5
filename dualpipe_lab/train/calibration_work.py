"""The work that `train.calibrate` measures on every rank, and the rounds that measure it.

In: precisions and seconds.  Out: for every piece of work the seconds of each round.
  round        every piece once, one after the other, so that what else the machine does meets all of them alike
  piece        as many calls as take 100 us, between two readings of the clock, after one that only warms the caches
  clock        of a rank with one thread on a CPU its own processor time, which other programs take nothing of; else the
               wall's, and for messages always
  sizes        double until one call takes 1/400 of the time that there is
All ranks compute at once, as in training: they share caches, memory and power.  A message is half of a message and its
answer between ranks 0 and 1, while all other ranks wait.
Elsewhere: nccl-tests; torch.utils.benchmark, which measures one piece after the other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import ceil
from time import perf_counter, thread_time, time
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from dualpipe_lab import comm
from dualpipe_lab.models.llama import Llama
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.topology import Topology
from dualpipe_lab.train.calibration import Work
from dualpipe_lab.train.calibration_kernels import kernels_of
from dualpipe_lab.world import accelerator
from dualpipe_lab.world.context import device

Call: TypeAlias = Callable[[], object]
Clock: TypeAlias = Callable[[], float]
LEAST_ROUNDS = 3
_LEAST_SECONDS = 1e-4  # of one measurement
_LEAST_MESSAGES_SECONDS, _MOST_MESSAGES = 1e-3, 20  # of one measurement of messages
_SHARE = 400  # one call takes at most this part of the time
_TIME_PART = 0.8  # of the seconds, for warming up and measuring; the rest starts and ends processes
_LEAST_SIZES, _LEAST_LAYERS = 5, 3
_SIDES = [2**power for power in range(4, 14)]  # of square products
_KERNEL_BYTES = [4**power for power in range(6, 15)]
_MESSAGE_BYTES = [4**power for power in range(5, 13)]
_LAYERS, _TOKENS = (64, 128, 256, 512, 1024, 2048, 4096), 256  # their hidden sizes, and tokens in two sequences


@dataclass
class Timed:
    """A piece of work: its call, the calls of one measurement, the part of a call that it is, the seconds by round."""

    work: Work
    call: Call
    calls: int = 1
    part: float = 1.0
    seconds: list[float] = field(default_factory=list)

    def measure(self, clock: Clock) -> None:
        """Add the seconds of one call."""
        if self.calls > 1:
            self.call()
        self.seconds.append(seconds_of(self.call, self.calls, clock) * self.part)


def seconds_of(call: Call, calls: int, clock: Clock = perf_counter) -> float:
    """Return the seconds of one of `calls` calls, with what they have queued on the device."""
    _synchronize()
    start = clock()
    for _ in range(calls):
        call()
    _synchronize()
    return (clock() - start) / calls


class Measured(NamedTuple):
    """What one rank has measured.

    Attributes:
        seconds: of every piece of work, by round.
        processor: the part of the time, while it computed, in which it had its processor; 1 where that is not told.
        gpu: its name; empty on a CPU.
        gpu_bytes: its memory; 0 on a CPU.
    """

    seconds: dict[Work, list[float]]
    processor: float
    gpu: str
    gpu_bytes: int


def measure(rank: int, world_size: int, precisions: tuple[str, ...], seconds: float, start: float) -> Measured:
    """Measure all work on this rank; every rank calls this.

    Args:
        rank: of this process.
        world_size: of all.
        precisions: types of numbers.
        seconds: that all of it may take.
        start: when it was asked for, by the wall's clock.
    """
    limit, clock = seconds / _SHARE, _local_clock()
    kernels = [*(_products(precision) for precision in precisions), _sums()]
    local = [timed for works in kernels for timed in _grow(works, limit, clock, _LEAST_SIZES)]
    local += _grow(_layers(precisions[0], world_size), limit, clock, _LEAST_LAYERS)
    shared = [*_messages(rank, limit), *_all_reduces(limit)] if world_size > 1 else []
    spent, passed, more = 0.0, 0.0, True
    while more:
        began, before, at = time(), clock(), perf_counter()
        for timed in local:
            timed.measure(clock)
        spent, passed = spent + clock() - before, passed + perf_counter() - at
        comm.barrier()
        for timed in shared:
            timed.measure(perf_counter)
        now = time()
        fits = now - start + (now - began) <= _TIME_PART * seconds
        more = bool(_agreed(len(local[0].seconds) < LEAST_ROUNDS or fits))
    return Measured({timed.work: timed.seconds for timed in [*local, *shared]}, min(1.0, spent / passed), *_gpu())


def _local_clock() -> Clock:
    return thread_time if device().type == "cpu" and torch.get_num_threads() == 1 else perf_counter


def _agreed(value: float) -> float:
    """Return what rank 0 says."""
    found = torch.tensor([value], dtype=torch.float64, device="cpu")  # read by the host: it travels on GLOO
    comm.broadcast(found, 0)
    return float(found.item())


def _grow(works: Iterator[tuple[Work, Call]], limit: float, clock: Clock, least: int) -> list[Timed]:
    """Return pieces of work of growing sizes, warm, until a call takes longer than the limit; some at least."""
    found: list[Timed] = []
    for work, call in works:
        call()
        once = min(seconds_of(call, 1, clock), seconds_of(call, 1, clock))
        if once > limit and len(found) >= least:
            break
        found.append(Timed(work, call, ceil(_LEAST_SECONDS / once)))
    return found


def _products(precision: str) -> Iterator[tuple[Work, Call]]:
    """Yield square products, which are fitted, and flat ones of twice their FLOPs, which are held out."""
    for side in _SIDES:
        for width, held_out in ((side, False), (2 * side, True)):
            first, second = _numbers((side, side), precision), _numbers((side, width), precision)
            label, flops = f"{side} x {side} x {width}", 2.0 * side * side * width
            yield Work("product", precision, label, flops, held_out), _product(first, second)


def _product(first: Tensor, second: Tensor) -> Call:
    return lambda: first @ second


def _sums() -> Iterator[tuple[Work, Call]]:
    """Yield sums of two vectors: every second size is held out."""
    for index, num_bytes in enumerate(size * factor for size in _KERNEL_BYTES for factor in (1, 2)):
        first, second = (_numbers((num_bytes // 4,), "float32") for _ in range(2))
        work = Work("elementwise", "float32", f"{num_bytes // 4} + {num_bytes // 4}", 3.0 * num_bytes, index % 2 == 1)
        yield work, _sum(first, second)


def _sum(first: Tensor, second: Tensor) -> Call:
    return lambda: first + second


def _layers(precision: str, world_size: int) -> Iterator[tuple[Work, Call]]:
    """Yield the forward and backward of full layers: the smallest tells the overhead in it, the others check it."""
    for hidden in _LAYERS:
        config = LlamaConfig(256, hidden, 4 * hidden, 1, hidden // 32, hidden // 64)
        dtype = getattr(torch, precision)
        layer = Llama(config, Topology([("dp", world_size)]), dtype=dtype).layers[0]
        step = _step(layer, _numbers((2, _TOKENS // 2, hidden), precision))
        kernels = kernels_of(step)
        flops = sum(size * number for kind, size, number in kernels if kind == "product")
        label, held_out = f"{_TOKENS} tokens, hidden {hidden}", hidden > _LAYERS[0]
        yield Work("layer", precision, label, flops, held_out, kernels), step


def _step(layer: Any, x: Tensor) -> Call:
    """Return a forward and backward of a layer, whose gradients are dropped."""
    x.requires_grad_()

    def step() -> None:
        out = layer(x)
        torch.autograd.grad(out, [x, *layer.parameters()], torch.ones_like(out))

    return step


def _messages(rank: int, limit: float) -> list[Timed]:
    """Return messages of every size; rank 0 says for all which are quick enough, and how many are one measurement."""
    found: list[Timed] = []
    for index, num_bytes in enumerate(size * factor for size in _MESSAGE_BYTES for factor in (1, 2)):
        work = Work("message", "float32", "from rank 0 to 1", float(num_bytes), index % 4 == 3)
        if index % 2 and not work.held_out:
            continue
        call = _exchange(rank, _numbers((num_bytes // 4,), "float32"))
        call()
        once = _agreed(seconds_of(call, 1))
        if once > limit and len(found) >= _LEAST_SIZES:
            break
        found.append(Timed(work, call, min(_MOST_MESSAGES, ceil(_LEAST_MESSAGES_SECONDS / once)), part=0.5))
    return found


def _exchange(rank: int, tensor: Tensor) -> Call:
    def call() -> None:
        if rank == 0:
            comm.send(tensor, 1)
            comm.recv(tensor, 1)
        elif rank == 1:
            comm.recv(tensor, 0)
            comm.send(tensor, 0)

    return call


def _all_reduces(limit: float) -> list[Timed]:
    found: list[Timed] = []
    for num_bytes in _MESSAGE_BYTES[2::2]:
        call = _all_reduce(_numbers((num_bytes // 4,), "float32"))
        call()
        once = _agreed(seconds_of(call, 1))
        if once > limit and found:
            break
        calls = min(_MOST_MESSAGES, ceil(_LEAST_MESSAGES_SECONDS / once))
        found.append(Timed(Work("all-reduce", "float32", "of all ranks", float(num_bytes), True), call, calls))
    return found


def _all_reduce(tensor: Tensor) -> Call:
    return lambda: comm.all_reduce(tensor, "max")  # a sum would grow without end


def _numbers(shape: tuple[int, ...], precision: str) -> Tensor:
    return torch.randn(shape, device=device()).to(getattr(torch, precision))


def _synchronize() -> None:
    if device().type != "cpu":
        accelerator.current().synchronize()


def _gpu() -> tuple[str, int]:
    here = device()
    if here.type != "cuda" or not torch.cuda.is_available():  # another accelerator may call its device so
        return "", 0
    found = torch.cuda.get_device_properties(here)
    return str(found.name), int(found.total_memory)
