"""recompute: bitwise torch's non-reentrant checkpoint, and as many stored bytes as the closed form says."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from dualpipe_lab.pp.runtime import recompute, recompute_layers

LAYERS, WIDTH, ROWS = 16, 8, 4


def make_layers(number=LAYERS, dropout=0.0):
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(number)
    )


def run(layers, how, x_seed=1):
    """Output, gradient of the input and of the parameters; dropout draws its own numbers each time."""
    torch.manual_seed(x_seed)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    layers.zero_grad()
    y = x
    for layer in layers:
        y = how(layer, y)
    torch.rand(3)  # what happens between forward and backward must not matter
    y.square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in layers.parameters())], torch.rand(1)


def with_torch(layer, x):
    return checkpoint(layer, x, use_reentrant=False)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_bitwise_equal_to_torch_and_to_keeping_everything(dropout):
    layers = make_layers(5, dropout)
    ours, after = run(layers, recompute)
    for how in (with_torch, lambda layer, x: layer(x)):
        theirs, after_theirs = run(layers, how)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert torch.equal(after, after_theirs)  # the generator goes on as if nothing had been repeated


def stored(layers, length):
    """Bytes that autograd keeps between forward and backward, weights not counted."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in layers.parameters()}
    total = 0

    def pack(tensor):
        nonlocal total
        total += tensor.nbytes * (tensor.untyped_storage().data_ptr() not in weights)
        return tensor

    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = recompute_layers(list(layers), x, length) if length else nn.Sequential(*layers)(x)
    y.sum().backward()
    return total


def test_bytes_equal_the_closed_form():
    layers = make_layers()
    boundary = ROWS * WIDTH * 4
    assert stored(layers, None) == LAYERS * 9 * boundary  # input, 4 before and 4 after GELU
    for length in (1, 2, 3, 4, 8, 16):
        assert stored(layers, length) == -(-LAYERS // length) * boundary


def test_a_segment_runs_twice_and_stops_at_what_it_needs():
    calls = []

    def note(name):
        return lambda layer, args, output: calls.append(name)

    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    for number, layer in enumerate(layers):
        layer.register_forward_hook(note(number))
    recompute(layers, torch.randn(ROWS, WIDTH, requires_grad=True)).sum().backward()
    assert calls == [0, 1, 2, 0, 1]  # nobody needs the last layer's output again


def test_the_input_needs_no_gradient_and_arguments_may_be_anything():
    linear = nn.Linear(WIDTH, WIDTH)

    def segment(x, factor, tokens):
        return (linear(x) * factor)[tokens].tanh()

    recompute(segment, torch.ones(ROWS, WIDTH), 3.0, torch.tensor([0, 2])).sum().backward()
    ours = linear.weight.grad.clone()
    linear.zero_grad()
    segment(torch.ones(ROWS, WIDTH), 3.0, torch.tensor([0, 2])).sum().backward()
    assert torch.equal(ours, linear.weight.grad)


def test_autocast_is_as_it_was():
    linear = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def grads(how):
        linear.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = how(nn.Sequential(linear, nn.Tanh(), linear), x)
        y.float().sum().backward()  # outside
        return linear.weight.grad

    assert torch.equal(grads(recompute), grads(lambda layer, x: layer(x)))


def test_without_gradients_nothing_is_kept():
    with torch.no_grad():
        assert recompute(nn.Linear(WIDTH, WIDTH), torch.ones(ROWS, WIDTH)).grad_fn is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:2], r"the second forward saved \(\(2, 8\), .* the first one \(\(4, 8\)"),
        (None, "saved 1 tensors less than the first one"),
    ],
)
def test_a_segment_that_does_something_else_is_found(change, message):
    calls = []

    def segment(x):
        calls.append(1)
        if len(calls) == 1:
            return torch.tanh(x.sin())
        return torch.tanh(change(x).sin()) if change else x.sin()

    y = recompute(segment, torch.randn(ROWS, WIDTH, requires_grad=True))
    with pytest.raises(RuntimeError, match=message):
        y.sum().backward()


def test_a_change_in_place_of_the_input_is_found():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    h = x * 1
    y = recompute(torch.tanh, h)
    h.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_empty_segment_is_refused():
    with pytest.raises(ValueError, match="at least 1 layer, got length=0; use 1 to 16"):
        recompute_layers(list(make_layers()), torch.ones(1, WIDTH), 0)
