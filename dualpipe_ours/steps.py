"""A stage in steps: pieces of work, and exchanges that stand aside while they are under way."""

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .exchange import start_exchange

Carry = dict[str, Any]  # what goes past an exchange, by name


class Compute(NamedTuple):
    """`f(x, carry) -> y, carry`."""

    f: Callable[[Tensor, Carry], tuple[Tensor, Carry]]


class Travel(NamedTuple):
    """An exchange: `sizes(carry) -> sends, receives, ranks`."""

    sizes: Callable[[Carry], tuple[list[int], list[int], list[int]]]


Step = Compute | Travel


def forward_of(steps: Sequence[Step], x: Tensor, tag: int) -> Generator[None, None, tuple[Tensor, list[Any]]]:
    """Run the steps, standing aside once an exchange has begun; return y and what the backward needs."""
    carry: Carry = {}
    saved: list[Any] = []
    for step in steps:
        if isinstance(step, Compute):  # a graph of its own, from leaves to y and the new carry
            x, carry = _leaf(x), {name: _leaf(value) for name, value in carry.items()}
            y, made = step.f(x, carry)
            saved.append((x, carry, y, made))
            x, carry = y.detach(), made
        else:
            sizes = step.sizes(carry)
            x, works = start_exchange(x, *sizes, tag)
            yield  # somebody else works while the rows travel
            for work in works:
                work.wait()
            saved.append(sizes)
    return x, saved


def backward_of(steps: Sequence[Step], saved: list[Any], dy: Tensor, tag: int) -> Generator[None, None, Tensor | None]:
    """The same steps from the last to the first; return the gradient of x."""
    dx: Tensor | None = dy
    carried: dict[str, Tensor | None] = {}  # gradients of the carry
    for step, kept in zip(reversed(steps), reversed(saved), strict=True):
        if isinstance(step, Compute):
            x, carry, y, made = kept
            pairs = [(y, dx), *((made[name], grad) for name, grad in carried.items())]
            given = [(out, grad) for out, grad in pairs if grad is not None and out.requires_grad]
            torch.autograd.backward([out for out, _ in given], [grad for _, grad in given])
            dx = x.grad if x.is_floating_point() else None
            carried = {n: v.grad for n, v in carry.items() if isinstance(v, Tensor) and v.is_floating_point()}
        else:
            assert dx is not None
            sends, receives, ranks = kept
            dx, works = start_exchange(dx, receives, sends, ranks, tag)  # the other way
            yield
            for work in works:
                work.wait()
    return dx


def take_turns(*generators: Generator[None, None, Any]) -> list[Any]:
    """Run each up to where it stands aside, in turn, until all have ended; return their values."""
    values: dict[int, Any] = {}
    while len(values) < len(generators):
        for number, generator in enumerate(generators):
            if number not in values:
                try:
                    next(generator)
                except StopIteration as end:  # its value is what the generator has returned
                    values[number] = end.value
    return [values[number] for number in range(len(generators))]


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.is_floating_point()) if isinstance(value, Tensor) else value
