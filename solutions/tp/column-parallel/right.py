"""Right answers of another style to the exercises on column-parallel layers."""

RIGHT = {
    "column_parallel-4": {
        "one Function for the layer and its sum": """
import torch
from torch.autograd.function import once_differentiable

from mine import ring


def now(weight, x, dy):
    return torch.einsum("to,ti->oi", dy, x)


HOOKS: dict = dict(weight_grad=now)


def total(part, ranks):
    part = part.contiguous().clone()
    ring.all_reduce(part, ranks)
    return part


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return total(grad, ctx.ranks), None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, ranks):
        ctx.x, ctx.weight, ctx.ranks = x, weight, ranks
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx, dy):
        dw = HOOKS["weight_grad"](ctx.weight, ctx.x, dy)
        dx = dy.matmul(ctx.weight)
        return dx if ctx.ranks is None else total(dx, ctx.ranks), dw, None


def linear(x, weight):
    return Product.apply(x, weight, None)


def column_linear(x, weight, ranks):
    return Product.apply(x, weight, ranks)
""",
        "a star: one rank adds": """
import torch
from dualpipe_lab.comm import get_rank, recv, send


def product(weight, x, dy):
    return (x.t() @ dy).t()


HOOKS = {}
HOOKS["weight_grad"] = product


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.matmul(x, w.T)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return torch.matmul(dy, w), HOOKS["weight_grad"](w, x, dy)


linear = Linear.apply


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return x + 0

    @staticmethod
    def backward(ctx, dy):
        first, *others = ctx.ranks
        if get_rank() != first:
            send(dy.contiguous(), first)
            dx = torch.empty(dy.shape, dtype=dy.dtype)
            recv(dx, first)
            return dx, None
        dx = dy.clone(memory_format=torch.contiguous_format)
        for other in others:
            part = torch.empty_like(dx)
            recv(part, other)
            dx += part
        for other in others:
            send(dx, other)
        return dx, None


def column_linear(x, weight, ranks):
    return linear(CopyToRanks.apply(x, ranks), weight)
""",
    },
    "column_parallel-3": {
        "by hand": """
def scaled_linear(x, scale, weight):
    h = copy_to_ranks(torch.mul(x, scale))
    return h @ weight.T
""",
        "with einsum": """
def scaled_linear(x, scale, weight):
    return torch.einsum("...i,oi->...o", copy_to_ranks(scale * x), weight)
""",
    },
}
