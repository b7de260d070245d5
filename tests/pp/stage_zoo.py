"""Modules that are hard to split into I and W: each pairs a module with an input."""

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from dualpipe_lab.pp.runtime import recompute

WIDTH = 8


class Block(nn.Module):
    """A transformer block with two norms and dropout."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        attention = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attention))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Tied(nn.Module):
    """One linear layer, used twice."""

    def __init__(self):
        super().__init__()
        self.twice, self.once = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.twice(torch.tanh(self.once(torch.tanh(self.twice(x)))))


class Scaled(nn.Module):
    """A vector that meets the input directly and, through an exponential, once more."""

    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x * self.scale) * self.scale.exp()


class Auxiliary(nn.Module):
    """Two further outputs: one of a parameter that is used elsewhere too, one of a parameter alone."""

    def __init__(self):
        super().__init__()
        self.linear, self.alone = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return self.linear(x), self.linear.weight.square().sum(), self.alone.exp().sum()


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.flatten(0, -2).t() @ grad.flatten(0, -2)


class Product(nn.Module):
    """x @ weight: autograd computes both of its gradients in one piece."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x):
        return Multiply.apply(x, self.weight)


class Again(nn.Module):
    """A region that is recomputed, then a layer that is not."""

    def __init__(self, how):
        super().__init__()
        self.how, self.head = how, nn.Linear(WIDTH, WIDTH)
        layers = [nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * WIDTH, WIDTH)]
        self.region = nn.Sequential(*layers)

    def forward(self, x):
        return self.head(self.how(self.region, x))


class InPlace(nn.Module):
    """Changes in place, a slice that is written, an output that is a view."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = torch.relu_(self.one(x))
        k = h.clone()
        k[..., 1:] = self.two(h)[..., 1:]
        return k.view(-1)


class Frozen(nn.Module):
    """A frozen weight, a frozen layer and a parameter that nothing uses."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(2, 2)
        self.one.weight.requires_grad_(False)
        self.middle = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x):
        return self.two(torch.tanh(self.middle(self.one(x))))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0]


def torch_checkpoint(region, x):
    return checkpoint(region, x, use_reentrant=False)


def reentrant_checkpoint(region, x):
    return checkpoint(region, x, use_reentrant=True)


ZOO = {
    "block": Block,
    "tied": Tied,
    "scaled": Scaled,
    "auxiliary": Auxiliary,
    "custom": lambda: nn.Sequential(Product(), nn.Linear(WIDTH, WIDTH)),
    "recompute": lambda: Again(recompute),
    "torch's checkpoint": lambda: Again(torch_checkpoint),
    "nested": lambda: Again(lambda region, x: recompute(lambda x: recompute(region, x), x)),
    "in place": InPlace,
    "frozen": Frozen,
    "convolution": lambda: nn.Sequential(nn.Conv1d(3, 3, 2), nn.BatchNorm1d(3)),
    "recurrent": Recurrent,
    "weight norm": lambda: nn.Sequential(weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, 3)),
    "no parameters": nn.Tanh,
    "identity": nn.Identity,
    "embedding": lambda: nn.Sequential(nn.Embedding(7, WIDTH), Block()),
}


def make(name, seed=0):
    """A module of the zoo and an input, in float64."""
    torch.manual_seed(seed)
    module = ZOO[name]().double()
    x = torch.tensor([[1, 2, 3], [0, 0, 6]]) if name == "embedding" else torch.randn(2, 3, WIDTH, dtype=torch.float64)
    return module, x
