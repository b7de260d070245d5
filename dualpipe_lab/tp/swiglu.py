"""`SwiGLU`: y = (silu(x W_g^T) * (x W_u^T)) W_d^T, with its inner features spread over the ranks.

Chapter: book/tp/swiglu.  In: `x_..SD`.  Out: `y_..SD`.
  da = dh * u * s(a) (1 + a (1 - s(a)))     du = dh * silu(a)     dh = dy W_d     with a = x W_g^T, u = x W_u^T
  messages   forward: the sum of y; backward: one sum of dx for both branches; T * h * bytes each
  memory     x, a and u are kept: T (h + 2 f / t); the product silu(a) * u is computed again
Each rank has the same features of gate and up: where both are stored as one matrix [gate; up], each half is cut.
Elsewhere: Megatron's gated `MLP`; torch's plan {gate: Colwise, up: Colwise, down: Rowwise}.
Source: Shazeer 2020 (arXiv 2002.05202), section 2; Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualpipe_lab.tp.config import TensorParallel
from dualpipe_lab.tp.linear import ColumnParallelLinear, RowParallelLinear
from dualpipe_lab.tp.parallel_linear import column_products, reduced_output, weight_grad, whole_output_grad
from dualpipe_lab.tp.shard import load_state


class SwiGLU(nn.Module):
    """The gated feed-forward layer of a Llama, without biases.

    Args:
        hidden_size, ffn_size: of the whole layer; the last ranks may have fewer inner features, or none.
        tp: the ranks (default: the world).
        dtype: of the weights.
    """

    def __init__(
        self, hidden_size: int, ffn_size: int, tp: TensorParallel | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.tp = tp or TensorParallel()
        self.gate = ColumnParallelLinear(hidden_size, ffn_size, False, self.tp, dtype=dtype)
        self.up = ColumnParallelLinear(hidden_size, ffn_size, False, self.tp, dtype=dtype)
        self.down = RowParallelLinear(ffn_size, hidden_size, False, self.tp, dtype=dtype)

    @classmethod
    def from_full(cls, gate: Tensor, up: Tensor, down: Tensor, tp: TensorParallel | None = None) -> "SwiGLU":
        """This rank's part of whole weights gate_FD, up_FD and down_DF."""
        layer = cls(gate.shape[1], gate.shape[0], tp, gate.dtype)
        load_state(layer, {"gate.weight": gate, "up.weight": up, "down.weight": down})
        return layer

    @classmethod
    def from_packed(cls, gate_up: Tensor, down: Tensor, tp: TensorParallel | None = None) -> "SwiGLU":
        """The same where gate and up are one matrix, one below the other.

        Raises:
            ValueError: the matrix has an odd number of rows.
        """
        if len(gate_up) % 2:
            raise ValueError(f"[gate; up] has as many rows of gate as of up, got {len(gate_up)} in all")
        gate, up = gate_up.chunk(2)
        return cls.from_full(gate, up, down, tp)

    def forward(self, x: Tensor) -> Tensor:
        """`y_..SD` of `x_..SD`; under sequence parallelism both have the rank's tokens."""
        a, u = column_products(x, [self.gate.weight, self.up.weight], [None, None], self.tp)
        out: Tensor = GatedDown.apply(a, u, self.down.weight, self.tp)
        return out


class GatedDown(torch.autograd.Function):
    """silu(a) * u, and the row-parallel product with it; a and u are `_..SF`, F: this rank's features."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, u: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        ctx.save_for_backward(a, u, weight)
        return reduced_output((nn.functional.silu(a) * u) @ weight.t(), None, tp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, u, weight = ctx.saved_tensors
        grad = whole_output_grad(grad, ctx.tp)
        sigmoid = torch.sigmoid(a)
        silu = a * sigmoid
        dw = weight_grad(grad, silu * u)
        dh = grad @ weight
        du = dh * silu
        da = dh.mul_(u).mul_(sigmoid.mul_(1 + a - silu))  # s(a) (1 + a (1 - s(a))) = s(a) (1 + a - silu(a))
        return da, du, dw, None
