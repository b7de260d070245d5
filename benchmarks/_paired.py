"""Two contenders in turns: what every benchmark of a pair measures, and the table that it prints.

In each round both take some steps, one after the other and in turns first, so that both meet the same load.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from rich.table import Table

import dualpipe_lab as lab

TIMES = ("ms", "theirs", "ratio (least to most)")
T = TypeVar("T")
Found = dict[str, list[float]]  # "wall ours", "cpu theirs": seconds per step, one per round


def in_turns(contenders: Iterable[T], number: int) -> list[T]:
    """The contenders of one round: every second time from the last to the first."""
    return list(contenders)[:: 1 if number % 2 else -1]


def spread(ratios: Sequence[float]) -> str:
    """The median with the least and the most."""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"


def paired(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    steps: int = 1,
    meet: Callable[[], object] = lab.comm.barrier,
) -> Found:
    """Seconds per step of each contender, "ours" and "theirs", in every round, on the wall and of CPU.

    Args:
        contenders: what takes one step.
        rounds: how many; one more comes first and is not counted.
        steps: in a row, of each contender in each round.
        meet: waits for the other ranks.
    """
    found: Found = {f"{kind} {name}": [] for kind in ("wall", "cpu") for name in contenders}
    for number in range(rounds + 1):
        for name in in_turns(contenders, number):
            meet()
            began, worked = time.perf_counter(), time.process_time()
            for _ in range(steps):
                contenders[name]()
            meet()
            if number:  # the first round warms up
                found[f"wall {name}"].append((time.perf_counter() - began) / steps)
                found[f"cpu {name}"].append((time.process_time() - worked) / steps)
    return found


def cells(found: Found) -> list[str]:
    """For wall and CPU: the medians of both in ms, and the median of the rounds' ratios with its spread."""
    texts = []
    for kind in ("wall", "cpu"):
        mine, other = found[f"{kind} ours"], found[f"{kind} theirs"]
        ratios = [one / two for one, two in zip(mine, other, strict=True)]
        texts += [f"{statistics.median(values) * 1e3:.1f}" for values in (mine, other)]
        texts.append(spread(ratios))
    return texts


def paired_table(title: str, first: str = "ours / theirs", more: tuple[str, ...] = ()) -> Table:
    """A table for rows of a name, the `cells` and more."""
    table = Table(title=title)
    for column in (first, *TIMES, f"CPU {TIMES[0]}", *TIMES[1:], *more):
        table.add_column(column, justify="right")
    return table
