"""The two cut matrix products, forward and backward, with their messages beside the arithmetic.

Chapters: book/tp/column-parallel, book/tp/row-parallel.  In: weights of this rank, stored [out, in].  Out: y = x W^T.
             forward                          backward
  column     y_r = x W_r^T                    dx = sum over r of dy_r W_r    dW_r = dy_r^T x     db_r = sum of dy_r
  row        y = sum over r of x_r W_r^T + b  dx_r = dy W_r                  dW_r = dy^T x_r     db = sum of dy
Sums over r are the messages: `T * in * bytes` are summed in column's backward, `T * out * bytes` in row's forward.
Several weights that share an input (gate and up; query, key and value) are one product here, with one sum of dx.
The plan of column's backward: compute dx and start its sum; compute dW while it travels; wait at the end.  Under
sequence parallelism the gather of x travels while dx is computed.
Elsewhere: Megatron `LinearWithGradAccumulationAndAsyncCommunication`.
Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3; Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe_lab.comm.groups import Group
from dualpipe_lab.tp.async_collectives import Pending, start_gather, start_reduce_scatter, start_sum
from dualpipe_lab.tp.config import TensorParallel
from dualpipe_lab.tp.mappings import TOKENS


def column_products(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    tp: TensorParallel,
    replicas: Sequence[Group | None] = (),
) -> tuple[Tensor, ...]:
    """The products of one input with several column-parallel weights: one tensor for each.

    Args:
        x: `x_..SD`, the same on every rank; under sequence parallelism the rank's tokens.
        weights: `weight_OD` each; O: this rank's outputs.
        biases: `bias_O`, or None, for each weight.
        tp: the ranks.
        replicas: for each weight, the ranks that hold the same one, whose gradients are summed; None if it is the only.
    """
    check_tokens(x)
    chosen = tuple(replicas) or (None,) * len(weights)
    out: tuple[Tensor, ...] = ColumnProducts.apply(x, tp, chosen, *weights, *biases)
    return out


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
    """The product with a row-parallel weight, summed over the ranks; the bias is added once, after the sum.

    Args:
        x: `x_..SI`; I: this rank's inputs.
        weight: `weight_DI`.
        bias: `bias_D`, the same on every rank.
        tp: the ranks; under sequence parallelism the result is the rank's tokens.
    """
    check_tokens(x)
    out: Tensor = RowProduct.apply(x, weight, bias, tp)
    return out


class ColumnProducts(torch.autograd.Function):
    """One input, several weights whose rows are spread over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tp: TensorParallel, replicas: tuple[Group | None, ...], *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[: len(replicas)], parameters[len(replicas) :]
        whole = start_gather(x, TOKENS, tp.group).wait() if tp.sequence_parallel else x
        ctx.tp, ctx.replicas, ctx.has_bias = tp, replicas, [bias is not None for bias in biases]
        ctx.is_cut = tp.sequence_parallel and tp.regather
        ctx.save_for_backward(x if ctx.is_cut else whole, *weights)
        return tuple(torch.nn.functional.linear(whole, *pair) for pair in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        tp, wants, num = ctx.tp, ctx.needs_input_grad, len(ctx.replicas)
        is_weight_wanted = any(wants[3 : 3 + num])
        gathering = start_gather(x, TOKENS, tp.group) if ctx.is_cut and is_weight_wanted else Pending(None, x)
        summing = _start_input_grad(grads, weights, tp) if wants[0] else None
        x = gathering.wait()
        products = [weight_grad(grad, x) if wanted else None for grad, wanted in zip(grads, wants[3:], strict=False)]
        sums = [
            grad if grad is None or group is None else start_sum(grad, group)
            for grad, group in zip(products, ctx.replicas, strict=True)
        ]
        biases = [rows(grad).sum(0) if has else None for grad, has in zip(grads, ctx.has_bias, strict=True)]
        found = [part.wait() if isinstance(part, Pending) else part for part in (*sums, summing)]
        return (found.pop(), None, None, *found, *biases)


class RowProduct(torch.autograd.Function):
    """A weight whose columns are spread over the ranks; the inputs are cut alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        ctx.save_for_backward(x, weight)
        return reduced_output(x @ weight.t(), bias, tp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = whole_output_grad(grad, ctx.tp)
        wants = ctx.needs_input_grad
        dx = grad @ weight if wants[0] else None
        return dx, weight_grad(grad, x) if wants[1] else None, rows(grad).sum(0) if wants[2] else None, None


def reduced_output(partial: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
    """The sum of the ranks' partial outputs, or the rank's tokens of it; `partial` is the caller's own."""
    if tp.sequence_parallel:
        out = start_reduce_scatter(partial, TOKENS, tp.group).wait()
    else:
        out = start_sum(partial, tp.group).wait()
    return out if bias is None else out.add_(bias)


def whole_output_grad(grad: Tensor, tp: TensorParallel) -> Tensor:
    """The gradient of every token's output: each rank has all of them, or its part."""
    return start_gather(grad, TOKENS, tp.group).wait() if tp.sequence_parallel else grad


def check_tokens(x: Tensor) -> None:
    """Refuse one token without an axis for tokens.

    Raises:
        ValueError: fewer than two axes.
    """
    if x.dim() < 2:
        raise ValueError(f"a parallel layer takes [..., tokens, features], got shape {tuple(x.shape)}; pass x[None]")


def rows(x: Tensor) -> Tensor:
    """Tokens of all sequences below one another: `x_..SD` as `x_TD`."""
    return x.flatten(0, -2)  # which, unlike a view as (-1, ...), takes the empty part of a rank without features


def weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of a weight: dW = dy^T x, summed over all tokens."""
    return rows(grad).t() @ rows(x)


def _start_input_grad(grads: Sequence[Tensor], weights: Sequence[Tensor], tp: TensorParallel) -> Pending:
    """Sum dy_r W_r over the weights at home, and begin to sum it over the ranks."""
    dx = rows(grads[0]) @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        dx.addmm_(rows(grad), weight)
    dx = dx.view(*grads[0].shape[:-1], dx.shape[1])
    start = start_sum(dx, tp.group) if not tp.sequence_parallel else start_reduce_scatter(dx, TOKENS, tp.group)
    return start if tp.overlap else Pending(None, start.wait())
