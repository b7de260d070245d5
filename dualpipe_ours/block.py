"""A layer of a transformer, its heads and its MLP cut over the ranks."""

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.nn.functional import silu

from .column import CopyToRanks, column_linear, linear
from .row import SumFromRanks, row_linear
from .tokens import GatherTokens, ScatterTokens, mlp_between_cut_tokens

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def norm(x: Tensor, scale: Tensor) -> Tensor:
    """RMSNorm: x (T, d), scale (d,) -> (T, d)."""
    return scale * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def attention(x: Tensor, w: Mapping[str, Tensor], heads: int, attend: Attend) -> Tensor:
    """This rank's partial sum of the output: x (T, d), `heads` of its own -> (T, d)."""
    q, k, v = (linear(x, w[name]).unflatten(-1, (heads, -1)).transpose(0, 1) for name in "qkv")  # (heads, T, size)
    return linear(attend(q, k, v).transpose(0, 1).flatten(1), w["o"])


def layer(x: Tensor, w: Mapping[str, Tensor], heads: int, attend: Attend, ranks: list[int], cut: bool) -> Tensor:
    """Attention and MLP with their residuals; with `cut`, x and the result are this rank's tokens, else all."""
    if cut:
        own = GatherTokens.apply(norm(x, w["norm1"]), ranks)
        x = x + ScatterTokens.apply(attention(own, w, heads, attend), ranks)  # x behind the sum, or it is added N times
        return x + mlp_between_cut_tokens(norm(x, w["norm2"]), w["up"], w["down"], ranks)
    own = CopyToRanks.apply(norm(x, w["norm1"]), ranks)
    x = x + SumFromRanks.apply(attention(own, w, heads, attend), ranks)
    return x + row_linear(silu(column_linear(norm(x, w["norm2"]), w["up"], ranks)), w["down"], ranks)
