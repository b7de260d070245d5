"""A training step of ours beside torch's: DDP, ZeroRedundancyOptimizer and FSDP2, on 2 GLOO ranks.

The same model, the same data, one thread per rank.  In each round both contenders take some steps, one after the other
and in turns first, so that both meet the same load; medians over the rounds, and the median of the rounds' ratios.
CPU time is that of rank 0's process with GLOO's threads; on a busy machine it says more than the time on the wall.

    python benchmarks/dp.py [--rounds 15] [--steps 4] [--width 256] [--layers 8]
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import dualpipe_lab as lab
from dualpipe_lab.dp.adam import Hyper
from dualpipe_lab.dp.ddp import Ddp
from dualpipe_lab.dp.measure import live_tensors, storage_bytes
from dualpipe_lab.dp.sharded import Options
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.dp.zero3 import Zero3

RANKS, BATCH = 2, 64
HYPER = Hyper(1e-3, weight_decay=0.01)
TITLES = {
    "ddp": "Ddp / DistributedDataParallel + AdamW",
    "zero1": "Zero1 / DDP + ZeroRedundancyOptimizer",
    "zero3": "Zero3 / FSDP2 fully_shard + AdamW",
}
Step = Callable[[Tensor], None]


def make(width: int, layers: int) -> nn.Sequential:
    """A stack of two-layer blocks."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers))
    return nn.Sequential(*blocks)


def ours(kind: str, model: nn.Sequential) -> Step:
    """A step of the library."""
    if kind == "zero3":
        optimizer = Zero3(model, list(model), options=Options(HYPER))
    else:
        optimizer = {"ddp": Ddp, "zero1": Zero1}[kind](model, options=Options(HYPER))

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        (model(x).square().mean() / RANKS).backward()
        optimizer.step()

    return step


def theirs(kind: str, model: nn.Sequential) -> Step:
    """A step of torch."""
    numbers = {"lr": HYPER.lr, "weight_decay": HYPER.weight_decay}
    if kind == "zero3":
        for block in model:
            fully_shard(block)
        wrapped = fully_shard(model)
        optimizer = torch.optim.AdamW(wrapped.parameters(), **numbers)
    else:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if kind == "zero1":
            optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, **numbers)
        else:
            optimizer = torch.optim.AdamW(wrapped.parameters(), **numbers)

    def step(x: Tensor) -> None:
        optimizer.zero_grad(set_to_none=kind == "zero3")  # DDP keeps its views of the buckets
        wrapped(x).square().mean().backward()
        optimizer.step()

    return step


def held() -> int:
    """Bytes of the tensors that Python can reach."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in live_tensors())
    return storage_bytes(tensor.detach() for tensor in local)


def compare(rank: int, world_size: int, kind: str, rounds: int, steps: int, width: int, layers: int) -> dict[str, list]:
    """Seconds per step of both contenders in every round, and the bytes that each holds."""
    x = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(rank))
    gc.freeze()
    contenders, found = {}, {"bytes": []}
    for name, build in (("ours", ours), ("theirs", theirs)):
        before = held()
        contenders[name] = build(kind, make(width, layers))
        contenders[name](x)
        found["bytes"].append(held() - before)
        found[name], found[f"cpu {name}"] = [], []
    for number in range(rounds + 1):
        for name in ("ours", "theirs") if number % 2 else ("theirs", "ours"):
            lab.comm.barrier()
            began, worked = time.perf_counter(), time.process_time()
            for _ in range(steps):
                contenders[name](x)
            lab.comm.barrier()
            if number:  # the first round warms up
                found[name].append((time.perf_counter() - began) / steps)
                found[f"cpu {name}"].append((time.process_time() - worked) / steps)
    return found


def columns(mine: list[float], other: list[float]) -> list[str]:
    """Medians of both, in ms, and the median of their ratios with its spread."""
    ratios = [one / two for one, two in zip(mine, other, strict=True)]
    medians = [f"{statistics.median(values) * 1e3:.1f}" for values in (mine, other)]
    return [*medians, f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"]


def main() -> None:
    """Run all comparisons and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    numel = sum(parameter.numel() for parameter in make(arguments.width, arguments.layers).parameters())
    table = Table(title=f"{RANKS} GLOO ranks, {numel / 1e6:.1f} million fp32 parameters, {arguments.rounds} rounds")
    times = ("ms per step", "theirs", "ratio (least to most)", "CPU ms per step", "theirs", "ratio (least to most)")
    for column in ("ours / theirs", *times, "bytes per parameter", "theirs"):
        table.add_column(column, justify="right")
    for kind, title in TITLES.items():
        sizes = arguments.rounds, arguments.steps, arguments.width, arguments.layers
        found = lab.launch(compare, RANKS, kind, *sizes, timeout=600, output="collect")[0]
        cells = [text for what in ("", "cpu ") for text in columns(found[f"{what}ours"], found[f"{what}theirs"])]
        table.add_row(title, *cells, *(f"{size / numel:.2f}" for size in found["bytes"]))
    Console().print(table)
    print("Bytes are those of tensors that Python can reach: buffers inside of torch's C++ reducer are not among them.")


if __name__ == "__main__":
    main()
