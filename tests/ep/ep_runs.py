"""What the tests of expert parallelism share: their oracle, whole numbers, and how far two runs are apart."""

import json

import torch
from runs import ORACLES


def oracle(name):
    """One block of `collectives.json`."""
    return json.loads((ORACLES / "collectives.json").read_text())[name]


def whole(seed, *shape, limit=4):
    """Small whole numbers: sums of their products are exact in any order."""
    numbers = torch.randint(-limit, limit + 1, shape, generator=torch.Generator().manual_seed(seed))
    return numbers.double()


def distance(found, expected):
    """The largest difference as A1 measures it; infinite for another shape."""
    if found is None or found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    return float((found - expected).detach().abs().max() / max(float(expected.detach().abs().max()), 1.0))
