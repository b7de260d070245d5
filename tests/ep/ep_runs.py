"""What the tests of expert parallelism share: their oracle, whole numbers, and work that takes time."""

import json

import torch
from runs import A1, ORACLES

import dualpipe_lab as lab


def oracle(name):
    """One block of `collectives.json`."""
    return json.loads((ORACLES / "collectives.json").read_text())[name]


def whole(seed, *shape, limit=4):
    """Small whole numbers: sums of their products are exact in any order."""
    numbers = torch.randint(-limit, limit + 1, shape, generator=torch.Generator().manual_seed(seed))
    return numbers.double()


def close(a, b):
    """Whether they differ by A1 at most, also where a gradient is 0 but for rounding."""
    largest = float(b.abs().max()) if b.numel() else 0.0
    return a.shape == b.shape and bool(((a - b).abs() <= A1 * max(1.0, largest)).all())


def working(forward_ms, backward_ms):
    """A function that returns its input after some time of work, and the gradient as well."""

    class Working(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            lab.compute(forward_ms)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            lab.compute(backward_ms)
            return grad

    return Working.apply
