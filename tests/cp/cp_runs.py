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


def attention_bounds(q, k, v, grad, causal, dtype):
    """What rounding may do to out, dq, dk and dv: by element, from the format, the number of terms and their sizes.

    Products and sums are made in fp32 at least: a score has d terms, an output a term for each key, and a weight is as
    far off as its score.  Rounded to the format of the tensors are the results and, inside of a gradient, the output.
    All in float64; `causal` is aligned as torch's.
    """
    q, k, v, grad = (tensor.double() for tensor in (q, k, v, grad))
    groups, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1) if causal else torch.zeros((), dtype=bool)
    weights = (q @ k.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1)
    scores = (q.abs() @ k.abs().mT * scale).masked_fill(hidden, 0)  # sums of absolute values
    wide = (k.shape[2] + 4 * q.shape[-1] + 16) * torch.finfo(torch.float32).eps * (1 + scores.max())
    relative = wide + 2 * torch.finfo(dtype).eps
    d_scores = weights * (grad.abs() @ v.abs().mT + (grad.abs() * (weights @ v.abs())).sum(-1, keepdim=True))
    sums = [weights @ v.abs(), d_scores @ k.abs() * scale, d_scores.mT @ q.abs() * scale, weights.mT @ grad.abs()]
    sums[2:] = [x.unflatten(1, (-1, groups)).sum(2) for x in sums[2:]]
    return [relative * x for x in sums]


def assert_close(ours, theirs, tolerance=1e-12, case=""):
    """Equal to a tolerance relative to the largest finite value; infinities and NaN must stand in the same places."""
    assert ours.shape == theirs.shape, case
    finite = theirs[theirs.isfinite()].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    assert torch.allclose(ours.double(), theirs.double(), rtol=0, atol=tolerance * scale), case
