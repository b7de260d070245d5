"""What the tests of expert parallelism share: seeded numbers, what was sent, and how far two runs are apart."""

import json
from pathlib import Path

import torch

import dualpipe_lab as lab
from dualpipe_lab.world.context import current

ORACLES = Path(__file__).parents[1] / "oracles"
A1 = 1e-12  # relative to the largest number of a tensor: what float64 leaves when a sum has another order


def oracle(name):
    """One block of `collectives.json`."""
    return json.loads((ORACLES / "collectives.json").read_text())[name]


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(seed, *shape, limit=4):
    """Small whole numbers: sums of their products are exact in any order."""
    numbers = torch.randint(-limit, limit + 1, shape, generator=torch.Generator().manual_seed(seed))
    return numbers.double()


def leaf(x):
    return x.detach().clone().requires_grad_()


def launch(fn, world_size, *args, **options):
    """A launch that prints nothing."""
    return lab.launch(fn, world_size, *args, output="collect", **options)


def counted(action):
    """What this rank sends in `action`: {operation: (calls, bytes sent)}."""
    entries = current().ledger.entries
    before = {name: (entry.count, entry.sent) for name, entry in entries.items()}
    action()
    after = {name: (entry.count, entry.sent) for name, entry in entries.items()}
    changes = {n: tuple(a - b for a, b in zip(after[n], before.get(n, (0, 0)), strict=True)) for n in after}
    return {name: change for name, change in changes.items() if change[0]}


def distance(found, expected):
    """The largest difference as A1 measures it; infinite for another shape."""
    if found is None or found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    return float((found - expected).detach().abs().max() / max(float(expected.detach().abs().max()), 1.0))
