"""Right answers of another style to the exercises on a Llama block."""

RIGHT = {
    "block-4": {
        "one way through, two pairs of borders": """
import torch
from torch import Tensor

from mine import column, row, tokens


def norm(x, scale):
    mean = (x * x).sum(-1, keepdim=True) / x.shape[-1]
    return x / torch.sqrt(mean + 1e-6) * scale


def attention(x, w, heads, attend):
    count, size = len(x), len(w["q"]) // heads
    parts = []
    for name in ("q", "k", "v"):
        parts.append(column.linear(x, w[name]).reshape(count, heads, size).permute(1, 0, 2))
    mixed = attend(*parts)
    return column.linear(mixed.permute(1, 0, 2).reshape(count, heads * size), w["o"])


def mlp(x, w):
    z = column.linear(x, w["up"])
    return column.linear(z * z.sigmoid(), w["down"])


def layer(x, w, heads, attend, ranks, cut):
    into = (tokens.GatherTokens if cut else column.CopyToRanks).apply
    out = (tokens.ScatterTokens if cut else row.SumFromRanks).apply
    x = x + out(attention(into(norm(x, w["norm1"]), ranks), w, heads, attend), ranks)
    return x + out(mlp(into(norm(x, w["norm2"]), ranks), w), ranks)
""",
        "head by head": """
import torch
import torch.nn.functional as F

from mine.column import CopyToRanks, linear
from mine.ring import all_gather, reduce_scatter
from mine.row import SumFromRanks


class In(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return all_gather(x, ranks)

    @staticmethod
    def backward(ctx, dy):
        return reduce_scatter(dy, ctx.ranks), None


class Out(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return reduce_scatter(x, ranks)

    @staticmethod
    def backward(ctx, dy):
        return all_gather(dy, ctx.ranks), None


def norm(x, scale):
    return F.rms_norm(x, scale.shape, scale, 1e-6)


def attention(x, w, heads, attend):
    split = [torch.stack(linear(x, w[name]).chunk(heads, dim=1)) for name in ("q", "k", "v")]
    return linear(torch.cat(list(attend(*split)), dim=1), w["o"])


def layer(x, w, heads, attend, ranks, cut):
    def around(fn, scale, x):
        n = norm(x, scale)
        if cut:
            return x + Out.apply(fn(In.apply(n, ranks)), ranks)
        return x + SumFromRanks.apply(fn(CopyToRanks.apply(n, ranks)), ranks)

    x = around(lambda n: attention(n, w, heads, attend), w["norm1"], x)
    return around(lambda n: linear(F.silu(linear(n, w["up"])), w["down"]), w["norm2"], x)
""",
    },
    "block-3": {
        "a scatter written out": [
            (
                "dx = scatter(grad @ weight)",
                "parts = torch.stack((grad @ weight).chunk(comm.get_world_size(), -2))\n"
                "        dx = torch.empty_like(x)\n"
                "        comm.reduce_scatter_single(dx, parts.flatten(0, 1))",
            ),
        ],
        "autograd of a product that is made again": """
class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.weight = x, weight
        return gather(x) @ weight.T

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            whole = gather(ctx.x.detach()).requires_grad_()
            weight = ctx.weight.detach().requires_grad_()
            dx, dw = torch.autograd.grad(whole @ weight.T, (whole, weight), grad)
        return scatter(dx), dw

class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return scatter(x)

    @staticmethod
    def backward(ctx, grad):
        return gather(grad)

def pair(x, first, second):
    return Leave.apply(Enter.apply(x, first).tanh() @ second.T)
""",
    },
}
