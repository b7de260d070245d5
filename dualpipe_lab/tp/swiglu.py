"""`SwiGLU`: y = (silu(x W_g^T) * (x W_u^T)) W_d^T, with the inner features sharded over the ranks.

Chapter: book/tp/swiglu.  In: `x_..SD`.  Out: `y_..SD`.
  da = dh * u * s(a) (1 + a (1 - s(a)))     du = dh * silu(a)     dh = dy W_d     with a = x W_g^T, u = x W_u^T
  messages   forward: the sum of y; backward: one sum of dx for both branches; T * h * bytes each
  memory     x, a and u are kept: T (h + 2 f / t); the backward recomputes silu(a) * u
Each rank holds the same features of gate and of up: of a packed matrix [gate; up], each half is sharded by itself.
Elsewhere: Megatron's gated `MLP`; torch's plan {gate: Colwise, up: Colwise, down: Rowwise}.
Source: Shazeer 2020 (arXiv 2002.05202), section 2; Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualpipe_lab.tp.linear import ColumnParallelLinear, RowParallelLinear, adapted, fused_column_linear, weight_grad
from dualpipe_lab.tp.mappings import gather_output_grad, reduce_output
from dualpipe_lab.tp.shard import TensorParallel, load_full_state_dict, ranks_of


class SwiGLU(nn.Module):
    """The gated feed-forward layer of a Llama, without biases.

    Args:
        hidden_size, ffn_size: of the full layer; the last ranks may have fewer inner features, or none.
        tp: the ranks (default: the world).
        dtype: of the weights.
    """

    def __init__(
        self, hidden_size: int, ffn_size: int, *, tp: TensorParallel | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.tp = ranks_of(tp)
        self.gate = ColumnParallelLinear(hidden_size, ffn_size, bias=False, tp=self.tp, dtype=dtype)
        self.up = ColumnParallelLinear(hidden_size, ffn_size, bias=False, tp=self.tp, dtype=dtype)
        self.down = RowParallelLinear(ffn_size, hidden_size, bias=False, tp=self.tp, dtype=dtype)

    @classmethod
    def from_full(cls, gate: Tensor, up: Tensor, down: Tensor, tp: TensorParallel | None = None) -> "SwiGLU":
        """Shard the full weights gate_FD, up_FD and down_DF."""
        layer = cls(gate.shape[1], gate.shape[0], tp=tp, dtype=gate.dtype)
        load_full_state_dict(layer, {"gate.weight": gate, "up.weight": up, "down.weight": down})
        return layer

    @classmethod
    def from_packed(cls, gate_up: Tensor, down: Tensor, tp: TensorParallel | None = None) -> "SwiGLU":
        """Shard full weights that come as gate_up_2FD, with gate above up, and down_DF.

        Raises:
            ValueError: the matrix has an odd number of rows.
        """
        if len(gate_up) % 2:
            raise ValueError(f"[gate; up] has as many rows of gate as of up, got {len(gate_up)} in all")
        gate, up = gate_up.chunk(2)
        return cls.from_full(gate, up, down, tp)

    def forward(self, x: Tensor) -> Tensor:
        """Return `y_..SD` of `x_..SD`; under sequence parallelism both hold the rank's tokens."""
        products = fused_column_linear(x, [self.gate.weight, self.up.weight], self.tp)
        a, u = adapted(x, products, (self.gate, self.up))
        if self.down.adapter is not None:  # it needs silu(a) * u, which is then kept
            return self.down(Gated.apply(a, u))
        out: Tensor = GatedDown.apply(a, u, self.down.weight, self.tp)
        return out


class Gated(torch.autograd.Function):
    """silu(a) * u."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, u: Tensor) -> Tensor:
        ctx.save_for_backward(a, u)
        return nn.functional.silu(a) * u

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor]:
        a, u = ctx.saved_tensors
        sigmoid = torch.sigmoid(a)
        return gate_grads(dh.clone(), a, u, sigmoid, a * sigmoid)


class GatedDown(torch.autograd.Function):
    """y = (silu(a) * u) W_d^T, summed over the ranks; a and u are `_..SF`, F: this rank's features."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, u: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        ctx.save_for_backward(a, u, weight)
        return reduce_output((nn.functional.silu(a) * u) @ weight.t(), tp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, u, weight = ctx.saved_tensors
        grad = gather_output_grad(grad, ctx.tp)
        sigmoid = torch.sigmoid(a)
        silu = a * sigmoid
        dw = weight_grad(grad, silu * u) if ctx.needs_input_grad[2] else None
        return *gate_grads(grad @ weight, a, u, sigmoid, silu), dw, None


def gate_grads(dh: Tensor, a: Tensor, u: Tensor, sigmoid: Tensor, silu: Tensor) -> tuple[Tensor, Tensor]:
    """Return da and du, given the gradient of silu(a) * u; the memory of dh becomes da's, and sigmoid's is lost."""
    du = dh * silu
    return dh.mul_(u).mul_(sigmoid.mul_(1 + a - silu)), du  # s(a) (1 + a (1 - s(a))) = s(a) (1 + a - silu(a))
