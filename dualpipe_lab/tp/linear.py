"""`ColumnParallelLinear` and `RowParallelLinear`: linear layers whose outputs, or inputs, are sharded over the ranks.

Chapters: book/tp/column-parallel, book/tp/row-parallel; book/tp/swiglu and book/tp/gqa for `fused_column_linear`.
In: sizes of the full layer.  Out: a module with this rank's shard of it; weights are stored [out, in].
The only messages are sums over the ranks: `T * in * bytes` in column's backward, `T * out * bytes` in row's forward.  A
column-parallel layer followed by a row-parallel one needs one sum in each direction: the tensor between them stays
sharded, so only functions of single features may stand there.
Elsewhere: Megatron layers of the same names and `LinearWithGradAccumulationAndAsyncCommunication`; torch
`ColwiseParallel`, `RowwiseParallel`; picotron `LinearWithAsyncAllReduce`.  Megatron packs the weights behind one input
into one matrix (`linear_qkv`, `linear_fc1`).
Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3; Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from dualpipe_lab import comm
from dualpipe_lab.comm.call import Pending
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.launch.context import device
from dualpipe_lab.tp.mappings import (
    TOKENS,
    all_gather_async,
    all_reduce_async,
    gather_from_ranks,
    gather_output_grad,
    input_sum_async,
    reduce_output,
)
from dualpipe_lab.tp.shard import Shard, TensorParallel, initialize_parameters, load_full_state_dict, ranks_of


class ColumnParallel(torch.autograd.Function):
    """y_r = x W_r^T + b_r of a replicated x; the sum of dx is under way while dW is computed.

    dx = sum over r of dy_r W_r,   dW_r = dy_r^T x,   db_r = sum dy_r.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)  # y_..SO of x_..SD and weight_OD: every rank has all of x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (needs_dx, needs_dw, needs_db, _) = ctx.saved_tensors, ctx.needs_input_grad
        dx = dw = summing = None
        if needs_dx:
            dx = (flat_tokens(dy) @ weight).unflatten(0, dy.shape[:-1])  # dx_..SD: this rank's partial sum
            summing = comm.all_reduce(dx, group=ctx.tp.group, async_op=ctx.tp.overlap)
        if needs_dw:
            dw = weight_grad(dy, x)  # dW_OD, while dx is summed over the ranks
        db = flat_tokens(dy).sum(0) if needs_db else None
        if summing is not None:
            summing.wait()
        return dx, dw, db, None


class FusedColumnParallel(torch.autograd.Function):
    """The same for several weights behind one x, and under sequence parallelism: y_i = x W_i^T + b.

    dx = sum over ranks and weights of dy_i W_i, in one message.  Only a single weight has a bias.  Sequence parallelism
    gathers tokens, or reduce-scatters them, in place of a sum; each of the two sends half the bytes of a sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        tp: TensorParallel,
        replicas: Sequence[Group | None],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        full = all_gather_async(x, TOKENS, tp.group).wait() if tp.sequence_parallel else x
        ctx.tp, ctx.replicas = tp, replicas
        ctx.regathers = tp.sequence_parallel and tp.regather
        ctx.save_for_backward(x if ctx.regathers else full, *weights)
        return tuple(linear(full, weight, bias) for weight in weights)  # y_..SO of x_..SD and weight_OD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_dx, needs_db, _, _, *needs_dw = ctx.needs_input_grad
        gathering = all_gather_async(x, TOKENS, ctx.tp.group) if ctx.regathers and any(needs_dw) else None
        summing = _input_grad_async(dys, weights, ctx.tp) if needs_dx else None
        if gathering is not None:
            x = gathering.wait()
        dws = [weight_grad(dy, x) if needed else None for dy, needed in zip(dys, needs_dw, strict=True)]
        pending = [
            all_reduce_async(dw, group) if dw is not None and group is not None else None
            for dw, group in zip(dws, ctx.replicas, strict=True)
        ]
        db = flat_tokens(dys[0]).sum(0) if needs_db else None
        dws = [dw if part is None else part.wait() for dw, part in zip(dws, pending, strict=True)]
        return None if summing is None else summing.wait(), db, None, None, *dws


def _input_grad_async(dys: Sequence[Tensor], weights: Sequence[Tensor], tp: TensorParallel) -> Pending[Tensor]:
    """Add up dy_i W_i over this rank's weights, and launch the sum over the ranks."""
    dx = flat_tokens(dys[0]) @ weights[0]
    for dy, weight in zip(dys[1:], weights[1:], strict=True):
        dx.addmm_(flat_tokens(dy), weight)
    return input_sum_async(dx.unflatten(0, dys[0].shape[:-1]), tp)


class RowParallel(torch.autograd.Function):
    """y = sum over r of x_r W_r^T, plus b once; without sequence parallelism the backward sends nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        ctx.save_for_backward(x, weight)
        y = reduce_output(x @ weight.t(), tp)  # y_..SD of x_..SI and weight_DI
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dy = gather_output_grad(dy, ctx.tp)  # of all tokens, so each gradient is complete
        (x, weight), (needs_dx, needs_dw, needs_db, _) = ctx.saved_tensors, ctx.needs_input_grad
        dx = dy @ weight if needs_dx else None
        dw = weight_grad(dy, x) if needs_dw else None
        return dx, dw, flat_tokens(dy).sum(0) if needs_db else None, None


class ShardedLinear(nn.Module):
    """A linear layer of which each rank holds a shard, on its device: the base of both layers.

    Attributes:
        in_features, out_features: of the full layer.
        shards: the `Shard` of each parameter that is sharded.
        adapter: what `models.add_lora` adds to the output; None without one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        shard: Shard,
        tp: TensorParallel,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.tp = in_features, out_features, tp
        sizes = [out_features, in_features]
        sizes[shard.axis] = shard.stop - shard.start
        self.weight = nn.Parameter(torch.empty(*sizes, dtype=dtype, device=device()))
        self.bias = nn.Parameter(torch.empty(sizes[0], dtype=dtype, device=device())) if bias else None
        self.adapter: nn.Module | None = None
        self.shards = {"weight": shard}
        if bias and shard.axis == 0:
            self.shards["bias"] = shard
        initialize_parameters(self)

    @classmethod
    def from_full(cls, full: nn.Linear, tp: TensorParallel | None = None, **options: Any) -> Self:
        """Shard a layer that every rank has in full, on any device; `options` are those of the class."""
        options |= {"bias": full.bias is not None}
        layer = cls(full.in_features, full.out_features, tp=tp, dtype=full.weight.dtype, **options)  # type: ignore[arg-type]
        load_full_state_dict(layer, full.state_dict())
        return layer

    def extra_repr(self) -> str:
        """Sizes of the full layer, and the shape of this rank's shard."""
        return f"{self.in_features} -> {self.out_features}, here {tuple(self.weight.shape)}"


class ColumnParallelLinear(ShardedLinear):
    """y = x W^T + b, with the rows of W and the elements of b sharded over the ranks.

    Weights are drawn by name, and layers of one size start alike; `initialize_parameters(model)` draws by full names.

    Args:
        in_features, out_features: of the full layer; with outputs that do not divide, the last ranks have fewer.
        bias: whether there is one.
        tp: the ranks (default: the world).
        gather_output: give every rank all outputs instead of its shard.
        shard: the rows that this rank holds (default: the rank's equal share).
        dtype: of the parameters.

    Raises:
        ValueError: outputs are to be gathered and do not divide among the ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        tp: TensorParallel | None = None,
        gather_output: bool = False,
        shard: Shard | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        tp = ranks_of(tp)
        if gather_output and out_features % tp.size:
            raise ValueError(
                f"gather_output needs outputs that divide among the ranks, got {out_features} on {tp.size} ranks; "
                "leave the outputs sharded"
            )
        shard = shard or Shard(0, *tp.span(out_features), out_features)
        super().__init__(in_features, out_features, bias, shard, tp, dtype)
        self.gather_output = gather_output

    def forward(self, x: Tensor) -> Tensor:
        """Return `y_..SO` of `x_..SD`; O: this rank's outputs, or all of them with `gather_output`.

        Under sequence parallelism x holds the rank's tokens and y all tokens.
        """
        check_tokens(x)
        y: Tensor
        if self.tp.sequence_parallel:
            (y,) = FusedColumnParallel.apply(x, self.bias, self.tp, (None,), self.weight)
        else:
            y = ColumnParallel.apply(x, self.weight, self.bias, self.tp)
        (y,) = adapted(x, (y,), (self,))
        return gather_from_ranks(y, -1, self.tp.group) if self.gather_output else y


class RowParallelLinear(ShardedLinear):
    """y = sum over the ranks of x_r W_r^T, plus b: the columns of W are sharded, b is replicated.

    Weights are drawn by name, and layers of one size start alike; `initialize_parameters(model)` draws by full names.

    Args:
        in_features, out_features: of the full layer; with inputs that do not divide, the last ranks have fewer.
        bias: whether there is one; it is added once, after the sum.
        tp: the ranks (default: the world).
        dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        tp: TensorParallel | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        tp = ranks_of(tp)
        super().__init__(in_features, out_features, bias, Shard(1, *tp.span(in_features), in_features), tp, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return `y_..SD` of `x_..SI`; I: this rank's inputs; under sequence parallelism y holds the rank's tokens."""
        check_tokens(x)
        y: Tensor = RowParallel.apply(x, self.weight, self.bias, self.tp)
        return adapted(x, (y,), (self,))[0]


def weight_grad(dy: Tensor, x: Tensor) -> Tensor:
    """Return dW = dy^T x, summed over all tokens: `dW_OD` of `dy_..SO` and `x_..SD`."""
    return flat_tokens(dy).t() @ flat_tokens(x)


def flat_tokens(x: Tensor) -> Tensor:
    """Return `x_..SD` as `x_TD`: the tokens of all sequences as rows of one matrix."""
    return x.flatten(0, -2)  # which, unlike a view as (-1, ...), takes the empty shard of a rank without features


def at_least_float32(x: Tensor) -> Tensor:
    """Return a tensor in 32 bits, or in 64 if it has them."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def check_tokens(x: Tensor) -> None:
    """Refuse a tensor without a dimension for tokens."""
    if x.dim() < 2:
        raise ValueError(f"a parallel layer takes [..., tokens, features], got shape {tuple(x.shape)}; pass x[None]")


def fused_column_linear(
    x: Tensor, weights: Sequence[Tensor], tp: TensorParallel, replicas: Sequence[Group | None] = ()
) -> tuple[Tensor, ...]:
    """Multiply one input by several column-parallel weights; return `y_..SO` for each weight.

    Args:
        x: `x_..SD`, the same on every rank; under sequence parallelism the rank's tokens.
        weights: `weight_OD` each; O: this rank's outputs.
        tp: the ranks.
        replicas: for each weight, the ranks that hold the same shard and sum its gradient; None for a shard that only
            this rank holds (default: None for all).
    """
    check_tokens(x)
    out: tuple[Tensor, ...] = FusedColumnParallel.apply(x, None, tp, replicas or (None,) * len(weights), *weights)
    return out


def adapted(x: Tensor, outputs: Sequence[Tensor], layers: Sequence[ShardedLinear]) -> tuple[Tensor, ...]:
    """Add to the output of each layer what its adapter makes of x."""
    pairs = zip(outputs, layers, strict=True)
    return tuple(y if layer.adapter is None else y + layer.adapter(x) for y, layer in pairs)
