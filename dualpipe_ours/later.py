"""Weight gradients that wait: the input's gradient first, products of weights later."""

from typing import Any

from torch import Tensor

from .column import HOOKS
from .execute import KINDS, Run
from .row_messages import actions
from .stage import Stage

Left = list[tuple[Tensor, Tensor, Tensor]]


def now_or_later(left: Left) -> Any:
    """A hook of `linear` that puts a product off; what is no leaf has nowhere to add it to."""

    def later(weight: Tensor, x: Tensor, dy: Tensor) -> None:
        if not weight.is_leaf:
            raise ValueError(f"a weight of shape {list(weight.shape)} is no leaf: make a parameter of each slice")
        left.append((weight, x, dy))

    return later


class SplitStage(Stage):
    """A stage whose backward comes in two halves."""

    def input_grad(self, saved: Any, dy: Tensor) -> tuple[Tensor | None, Left]:
        """The gradient of the input, and the products that are left."""
        left: Left = []
        before, HOOKS["weight_grad"] = HOOKS["weight_grad"], now_or_later(left)
        try:
            return self.backward(saved, dy), left
        finally:
            HOOKS["weight_grad"] = before

    def weight_grads(self, left: Left) -> None:
        """Add the products to the gradients of their weights."""
        for weight, x, dy in left:
            grad = dy.t() @ x
            weight.grad = grad if weight.grad is None else weight.grad + grad


def run_i(run: Run, token: str) -> None:
    """The input's half of a backward."""
    ((number, _, i),) = actions(token)
    stage = run.stages[number]
    assert isinstance(stage, SplitStage)
    dx, run.saved[number, "W", i] = stage.input_grad(*run.before_b(number, i))
    run.after_b(number, i, dx)


def run_w(run: Run, token: str) -> None:
    """The weights' half."""
    ((number, _, i),) = actions(token)
    stage = run.stages[number]
    assert isinstance(stage, SplitStage)
    stage.weight_grads(run.saved.pop((number, "W", i)))


KINDS.update(I=run_i, W=run_w)
