"""What tests of parallel layers share: seeded numbers, distances, stages, quiet launches, what a rank sends."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dualpipe_lab as lab
from dualpipe_lab.comm import call
from dualpipe_lab.launch.context import rank_context

ORACLES = Path(__file__).parent / "oracles"
RANKS = [1, 3, *(pytest.param(number, marks=pytest.mark.every) for number in (2, 4))]  # of a group of ranks
A1 = 1e-12  # relative to the largest number of a tensor: what float64 leaves when a sum has another order


def rounding(dtype, num_terms, size=1.0):
    """What `num_terms` roundings of numbers up to `size` may add up to, whatever order or kernel a machine chooses."""
    return num_terms * torch.finfo(dtype).eps * size


def draw(seed, *shape):
    """The same normal numbers in every process."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


class Stages(nn.Module):
    """Some stages of a rank, by number."""

    def __init__(self, stages):
        super().__init__()
        self.parts = nn.ModuleDict({str(index): stages[index] for index in sorted(stages)})

    @property
    def stages(self):
        return {int(index): stage for index, stage in self.parts.items()}


class Made(TorchDispatchMode):
    """The shapes of all tensors that operations return meanwhile."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.shapes += [x.shape for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        return result


def launch(fn, world_size, *args, **options):
    return lab.launch(fn, world_size, *args, output="collect", **options)


def assert_refused(world_size, cases):
    """Every attempt of (attempt, message) is refused on every rank; one launch for all of them."""

    def fn(rank, world_size):
        for attempt, message in cases:
            with pytest.raises((TypeError, ValueError), match=message):
                attempt()

    launch(fn, world_size)


def counted(action):
    """What this rank sends in `action`: {operation: (calls, bytes sent)}."""
    entries = rank_context().ledger.entries
    before = {name: (entry.count, entry.sent) for name, entry in entries.items()}
    action()
    after = {name: (entry.count, entry.sent) for name, entry in entries.items()}
    changes = {n: tuple(a - b for a, b in zip(after[n], before.get(n, (0, 0)), strict=True)) for n in after}
    return {name: change for name, change in changes.items() if change[0]}


def sent(action):
    """The result of an action, and the bytes that this rank sends in it."""
    entries = rank_context().ledger.entries
    before = sum(entry.sent for entry in entries.values())
    result = action()
    return result, sum(entry.sent for entry in entries.values()) - before


def kept(action):
    """The tensors that autograd keeps for the backward of an action."""
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: found.append(saved) or saved, lambda saved: saved):
        action()
    return found


def devices_sent():
    """In a rank: the kinds of devices whose tensors its collectives send from now on, by the name of the collective."""
    found, check = defaultdict(set), call.check_tensors

    def note(name, group, *tensors):
        found[name].update(tensor.device.type for tensor in tensors)
        check(name, group, *tensors)

    call.check_tensors = note
    return found
