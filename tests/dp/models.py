"""A batch with what goes wrong, gradients to compare, launches that print nothing."""

import torch

import dualpipe_lab as lab

VOCABULARY = 7


def make_batch(rows=5, length=4, seed=1):
    """Targets of which some do not count; the last row counts nowhere, the first rows hold no token 6."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 6, (rows, length), generator=generator)
    tokens[rows // 2 :, 0] = 6
    targets = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    targets[torch.rand(rows, length, generator=generator) < 0.3] = -100
    targets[-1] = -100
    return tokens, targets


def grads(module):
    """The gradients that matter, cloned, by name; a parameter that nothing used counts as zeros."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def assert_close(ours, theirs, tolerance=1e-12):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (ours[name] - value).abs().max() <= tolerance * max(1.0, float(value.abs().max())), name


def worst(ours, theirs):
    """The largest difference of two state dicts."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - value.detach()).abs().max()) for name, value in theirs.items())


def launch(fn, world_size, *args, **options):
    """A launch that prints nothing."""
    return lab.launch(fn, world_size, *args, output="collect", **options)
