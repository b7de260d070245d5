"""What it costs to split a backward: I + W over B, ours and torch's, in CPU time and in operations.

    python benchmarks/pp_split.py [--rounds 15]

B is one walk of autograd.  Ours is `SplitBackward`; torch's is `stage_backward_input`, then `stage_backward_weight`.
Every round runs all three once, on one thread; medians of CPU milliseconds.
"""

import argparse
import os
import time
from collections.abc import Callable
from statistics import median

import torch
from _stages import Block
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode

from dualpipe_lab.pp import SplitBackward

LAYERS = 4


class Count(TorchDispatchMode):
    """Counts operations."""

    number = 0

    def __torch_dispatch__(
        self, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        """Count one."""
        self.number += 1
        return function(*args, **(kwargs or {}))


def whole(module: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> None:
    torch.autograd.backward([y], [dy])


def ours(module: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> None:
    split = SplitBackward([get_gradient_edge(y)], [x], has_hooks=False)
    split.input_grad([dy])
    split.weight_grad()


def torchs(module: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> None:
    _, groups = stage_backward_input([y], [dy], [x], module.parameters())
    stage_backward_weight(module.parameters(), groups)


def measure(module: nn.Module, x: Tensor, rounds: int) -> list[tuple[float, int]]:
    """CPU milliseconds and operations of the three."""
    contenders = (whole, ours, torchs)
    times: list[list[float]] = [[] for _ in contenders]
    operations = []
    for turn in range(rounds + 1):
        for contender, found in zip(contenders, times, strict=True):
            module.zero_grad()
            x = x.detach().requires_grad_()
            y = module(x)
            dy = torch.ones_like(y)
            if turn == 0:  # counting warms up too
                with Count() as count:
                    contender(module, x, y, dy)
                operations.append(count.number)
                continue
            began = time.process_time()
            contender(module, x, y, dy)
            found.append((time.process_time() - began) * 1e3)
    return [(median(found), number) for found, number in zip(times, operations, strict=True)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, load {os.getloadavg()[0]:.1f}; CPU ms (operations)")
    print(f"{'':<28}{'B':>16}{'I + W':>16}{'/ B':>7}{'torch I + W':>16}{'/ B':>7}")
    for width, rows in ((32, 16), (128, 64), (256, 128)):
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(LAYERS)]
        stages = {"linear, GELU": (nn.Sequential(*layers), torch.randn(rows, width))}
        blocks = nn.Sequential(*(Block(width) for _ in range(LAYERS)))
        stages["transformer block"] = blocks, torch.randn(1, rows, width)
        for name, (module, x) in stages.items():
            (b, *_), *others = found = measure(module, x, rounds)
            cells = [f"{cpu:.2f} ({number})" for cpu, number in found]
            ratios = [f"{cpu / b:.2f}" for cpu, _ in others]
            title = f"{LAYERS} x {name}, {rows} x {width}"
            print(f"{title:<34}{cells[0]:>14}{cells[1]:>14}{ratios[0]:>7}{cells[2]:>14}{ratios[1]:>7}", flush=True)


if __name__ == "__main__":
    main()
