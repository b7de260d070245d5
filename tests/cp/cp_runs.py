"""What the tests of context parallelism share: closeness, the oracle."""

import json

import torch
from runs import ORACLES

ORACLE = json.loads((ORACLES / "flash_attention.json").read_text())


def draw(*shape, seed=0, dtype=torch.float64):
    """Random numbers that are the same in every process."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def floats(values):
    """A float64 tensor of a list of the oracle, in which `-inf` is a string."""
    if isinstance(values, list):
        return torch.stack([floats(value) for value in values]) if values else torch.empty(0, dtype=torch.float64)
    return torch.tensor(float(values), dtype=torch.float64)


def assert_close(ours, theirs, tolerance=1e-12, case=""):
    """Equal to a tolerance relative to the largest finite value; infinities and NaN must stand in the same places."""
    assert ours.shape == theirs.shape, case
    finite = theirs[theirs.isfinite()].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    assert torch.allclose(ours.double(), theirs.double(), rtol=0, atol=tolerance * scale), case
