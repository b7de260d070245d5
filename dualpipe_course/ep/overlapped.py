"""Layers whose exchanges may hide, for checks: exact results, and model time of both directions.

An exchange takes 20 ms, the experts 10 forward and 20 backward, the shared expert 20 and 40.  Results are whole
numbers that say which expert worked on a row.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.exercise import Wrong
from dualpipe_course.trial import on_ranks
from dualpipe_lab.world.emulate.link import Link

if TYPE_CHECKING:
    from torch import Tensor

LINK = Link(gbps=0.0012)  # 3,000 bytes in 20 ms
TABLE, ROWS, COLUMNS = ((1, 3), (2, 2)), 4, 125  # every exchange takes as long as three rows


class Found(NamedTuple):
    """What one rank has after a step: first numbers of y and dx, milliseconds of both directions, bytes sent."""

    y: list[float]
    dx: list[float] | None
    forward: float
    backward: float
    sent: int


def check_layer(fn: Callable[..., Any], case: str, num_exchanges: int) -> Found:
    """Raise `Wrong` unless results, gradients and bytes are right; return what rank 0 found.

    Args:
        fn: from `x`, splits, expert and shared expert to `y`.
        case: what is tried, in words.
        num_exchanges: of rows, in both directions together.
    """
    results: list[Found] = list(on_ranks(_step, 2, fn, case=case, clock="virtual", link=LINK))
    for rank, found in enumerate(results):
        # row i of rank r: 10 r + i + 1; the expert of rank j multiplies by j + 2, the shared one by 10
        rows = [10.0 * rank + i + 1 for i in range(ROWS)]
        factors = [12.0 if i < TABLE[rank][0] else 13.0 for i in range(ROWS)]
        y = [row * factor for row, factor in zip(rows, factors, strict=True)]
        if found.y != y:
            raise Wrong(f"{case}: rank {rank}: y is {found.y}, should be {y}: both experts' results, in their places")
        dx = [factor * (i + 1) for i, factor in enumerate(factors)]
        if found.dx != dx:
            raise Wrong(f"{case}: rank {rank}: dx is {found.dx}, should be {dx}")
        needed = num_exchanges // 2 * (TABLE[0][1] + TABLE[1][0]) * COLUMNS * 8
        if found.sent != needed:
            raise Wrong(f"{case}: rank {rank} sent {found.sent} bytes, {needed} are {num_exchanges} exchanges of rows")
    return results[0]


def _step(rank: int, world_size: int, fn: Callable[..., Any]) -> Found:
    import torch

    from dualpipe_lab.ep.all_to_all import Splits
    from dualpipe_lab.world import context

    x = (10.0 * rank + 1 + torch.arange(ROWS).double()).repeat(COLUMNS, 1).t().contiguous().requires_grad_()
    began = context.now()
    y = fn(x, Splits(TABLE[rank], (TABLE[0][rank], TABLE[1][rank])), worker(rank + 2.0, 10), worker(10.0, 20))
    if not isinstance(y, torch.Tensor):
        raise TypeError(f"a tensor is needed, got {type(y).__name__}")
    middle = context.now()
    if y.requires_grad and y.shape == x.shape:
        y.backward((1 + torch.arange(ROWS).double()).unsqueeze(1).expand(-1, COLUMNS))
    end = context.now()
    sent = sum(entry.sent for entry in context.rank_context().ledger.entries.values())
    dx = None if x.grad is None else x.grad[:, 0].tolist()
    return Found(y.detach()[:, 0].tolist(), dx, (middle - began) / 1e6, (end - middle) / 1e6, sent)


def worker(factor: float, ms: float) -> Callable[["Tensor"], "Tensor"]:
    """A job: y = factor x, in `ms` forward and twice that backward."""
    import torch

    from dualpipe_lab.world import context

    class Work(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: "Tensor") -> "Tensor":
            context.compute(ms)
            return x * factor

        @staticmethod
        def backward(ctx: Any, grad: "Tensor") -> "Tensor":
            context.compute(2 * ms)
            return grad * factor

    return lambda x: Work.apply(x)
