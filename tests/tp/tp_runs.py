"""What the tests of tensor parallelism share: seeded numbers, parts of them, and how far two runs are apart."""

import json
from pathlib import Path

import torch

import dualpipe_lab as lab
from dualpipe_lab.tp.setting import TensorParallel
from dualpipe_lab.world.context import current

ORACLES = Path(__file__).parents[1] / "oracles"
A1 = 1e-12  # relative to the largest number of a tensor: what float64 leaves when a sum has another order
TOKENS = 12  # divides among 1, 2, 3 and 4 ranks


def oracle(name):
    """One block of `tp_blocks.json`."""
    return json.loads((ORACLES / "tp_blocks.json").read_text())[name]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def launch(fn, world_size, *args, **options):
    """A launch that prints nothing."""
    return lab.launch(fn, world_size, *args, output="collect", **options)


def own(x, dim, tp, is_cut=True):
    """This rank's part of a tensor along a dimension, or all of it."""
    if not is_cut:
        return x
    start, stop = tp.span(x.shape[dim])
    return x.narrow(dim, start, stop - start)


def leaf(x):
    return x.detach().clone().requires_grad_()


def distance(found, expected):
    """The largest difference, relative to the largest number; infinite for another shape."""
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    return float((found - expected).detach().abs().max() / max(float(expected.detach().abs().max()), 1e-30))


def distances(found, expected):
    """The same by name; a name that only one has is infinitely far."""
    names = found.keys() | expected.keys()
    return {n: distance(found[n], expected[n]) if n in found and n in expected else float("inf") for n in names}


def assert_a1(launched, limit=A1):
    """Every number that the ranks found is within the limit: `launched` holds a dict of distances by case per rank."""
    seen = 0
    for rank, found in enumerate(launched):
        for case, numbers in found.items():
            for name, value in numbers.items():
                seen += 1
                assert value <= limit, f"rank {rank}, {case}: {name} is off by {value:.1e}"
    assert seen  # a test that compared nothing proves nothing


def counted(action):
    """What this rank sends in `action`: {operation: (calls, bytes sent)}."""
    entries = current().ledger.entries
    before = {name: (entry.count, entry.sent) for name, entry in entries.items()}
    action()
    after = {name: (entry.count, entry.sent) for name, entry in entries.items()}
    changes = {n: tuple(a - b for a, b in zip(after[n], before.get(n, (0, 0)), strict=True)) for n in after}
    return {name: change for name, change in changes.items() if change[0]}


MODES = {
    "plain": {},
    "in turn": {"overlap": False},
    "sequence": {"sequence_parallel": True},
    "sequence, kept": {"sequence_parallel": True, "regather": False},
}


def modes():
    return {name: TensorParallel(**options) for name, options in MODES.items()}


def kept_bytes(forward, module):
    """Bytes of the distinct storages that autograd keeps for the backward, weights left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept = {}

    def pack(saved):
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = saved, storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        output = forward()
    del output
    return sum(size for _, size in kept.values())
