"""`ColumnParallelLinear` and `RowParallelLinear`: a layer's outputs, or its inputs, spread over the ranks.

Chapters: book/tp/column-parallel, book/tp/row-parallel.  In: sizes of the whole layer.  Out: a module with this
rank's part of it.
             weight [out, in]   bias     sums in the forward       sums in the backward
  column     rows of W          cut      none                      T * in * bytes (dx)
  row        columns of W       whole    T * out * bytes (y)       none
A column-parallel layer followed by a row-parallel one needs one sum in each direction: what lies between stays cut,
and may be any function of single features.
Elsewhere: Megatron layers of the same names; torch `ColwiseParallel`, `RowwiseParallel`.
Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
"""

from typing import Self

import torch
from torch import Tensor, nn

from dualpipe_lab.tp.config import TensorParallel
from dualpipe_lab.tp.mappings import gather_from_ranks
from dualpipe_lab.tp.parallel_linear import column_products, row_product
from dualpipe_lab.tp.shard import Shard, initialise, load_state, whole_state


class CutLinear(nn.Module):
    """A linear layer of which this rank holds a part.

    Attributes:
        in_features, out_features: of the whole layer.
        shards: which part each cut parameter is.
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
        self.weight = nn.Parameter(torch.empty(*sizes, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(sizes[0], dtype=dtype)) if bias else None
        self.shards = {"weight": shard}
        if bias and shard.axis == 0:
            self.shards["bias"] = shard
        initialise(self)

    @classmethod
    def from_full(cls, full: nn.Linear, tp: TensorParallel | None = None, **options: bool) -> Self:
        """This rank's part of a layer that every rank has whole; `options` are those of the class."""
        has_bias = full.bias is not None
        layer = cls(full.in_features, full.out_features, has_bias, tp, dtype=full.weight.dtype, **options)  # type: ignore[arg-type]
        load_state(layer, full.state_dict())
        return layer

    def to_full(self) -> nn.Linear:
        """The whole layer, on every rank; all ranks call this together."""
        state = whole_state(self, self.tp.group)
        full = nn.Linear(self.in_features, self.out_features, self.bias is not None, dtype=self.weight.dtype)
        full.load_state_dict(state)
        return full

    def extra_repr(self) -> str:
        """The whole layer, and what this rank has of it."""
        return f"{self.in_features} -> {self.out_features}, here {tuple(self.weight.shape)}"


class ColumnParallelLinear(CutLinear):
    """y = x W^T + b, with the rows of W and the elements of b spread over the ranks.

    Args:
        in_features, out_features: of the whole layer; with outputs that do not divide, the last ranks have fewer.
        bias: whether there is one.
        tp: the ranks (default: the world).
        gather_output: give every rank all outputs instead of its own.
        shard: which rows this rank holds, if not those of its turn.
        dtype: of the parameters.

    Raises:
        ValueError: outputs are to be gathered and do not divide among the ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        tp: TensorParallel | None = None,
        gather_output: bool = False,
        shard: Shard | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        tp = tp or TensorParallel()
        if gather_output and out_features % tp.size:
            raise ValueError(
                f"gather_output needs outputs that divide among the ranks, got {out_features} on {tp.size} ranks; "
                "leave the outputs cut"
            )
        shard = shard or Shard(0, *tp.span(out_features), out_features)
        super().__init__(in_features, out_features, bias, shard, tp, dtype)
        self.gather_output = gather_output

    def forward(self, x: Tensor) -> Tensor:
        """`y_..SO` of `x_..SD`; O: this rank's outputs, or all with `gather_output`.

        Under sequence parallelism x has the rank's tokens and y all of them.
        """
        (y,) = column_products(x, [self.weight], [self.bias], self.tp)
        return gather_from_ranks(y, -1, self.tp.group) if self.gather_output else y


class RowParallelLinear(CutLinear):
    """y = sum over the ranks of x_r W_r^T, plus b: the columns of W are spread over the ranks, b is on all of them.

    Args:
        in_features, out_features: of the whole layer; with inputs that do not divide, the last ranks have fewer.
        bias: whether there is one; it is added once, after the sum.
        tp: the ranks (default: the world).
        dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        tp: TensorParallel | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        tp = tp or TensorParallel()
        super().__init__(in_features, out_features, bias, Shard(1, *tp.span(in_features), in_features), tp, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`y_..SD` of `x_..SI`; I: this rank's inputs; under sequence parallelism y has the rank's tokens."""
        return row_product(x, self.weight, self.bias, self.tp)
