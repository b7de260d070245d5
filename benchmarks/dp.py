"""A training step of ours beside torch's: DDP, ZeroRedundancyOptimizer and FSDP2, on 2 GLOO ranks.

The same model, the same data, one thread per rank.  In each round both contenders take some steps, one after the other
and in turns first, so that both meet the same load; medians over the rounds, and the median of the rounds' ratios.
CPU time is that of rank 0's process with GLOO's threads; on a busy machine it says more than the time on the wall.

    python benchmarks/dp.py [--rounds 15] [--steps 4] [--width 256] [--layers 8]
"""

import argparse
import gc
from collections.abc import Callable
from functools import partial

import torch
from _paired import cells, paired, paired_table
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import dualpipe_lab as lab
from dualpipe_lab.dp import DDP, Zero1, Zero3, live_tensors, storage_bytes

RANKS, BATCH = 2, 64
HYPER = {"lr": 1e-3, "weight_decay": 0.01}
TITLES = {
    "ddp": "DDP / DistributedDataParallel + AdamW",
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
        optimizer = Zero3(model, units=list(model), **HYPER)
    else:
        optimizer = {"ddp": DDP, "zero1": Zero1}[kind](model, **HYPER)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        (model(x).square().mean() / RANKS).backward()
        optimizer.step()

    return step


def theirs(kind: str, model: nn.Sequential) -> Step:
    """A step of torch."""
    numbers = {"lr": HYPER["lr"], "weight_decay": HYPER["weight_decay"]}
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
    return storage_bytes(local)


def compare(rank: int, world_size: int, kind: str, rounds: int, steps: int, width: int, layers: int) -> tuple:
    """What both contenders took in every round, and the bytes that each holds."""
    x = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(rank))
    gc.freeze()
    contenders, num_bytes = {}, []
    for name, build in (("ours", ours), ("theirs", theirs)):
        before = held()
        contenders[name] = partial(build(kind, make(width, layers)), x)
        contenders[name]()
        num_bytes.append(held() - before)
    return paired(contenders, rounds, steps), num_bytes


def main() -> None:
    """Run all comparisons and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    numel = sum(parameter.numel() for parameter in make(arguments.width, arguments.layers).parameters())
    title = f"{RANKS} GLOO ranks, {numel / 1e6:.1f} million fp32 parameters, {arguments.rounds} rounds"
    table = paired_table(title, more=("bytes per parameter", "theirs"))
    for kind, name in TITLES.items():
        sizes = arguments.rounds, arguments.steps, arguments.width, arguments.layers
        found, num_bytes = lab.launch(compare, RANKS, kind, *sizes, timeout=600, output="collect")[0]
        table.add_row(name, *cells(found), *(f"{size / numel:.2f}" for size in num_bytes))
    Console(width=180).print(table)
    print("Bytes are those of tensors that Python can reach: buffers inside of torch's C++ reducer are not among them.")


if __name__ == "__main__":
    main()
