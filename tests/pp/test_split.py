"""The split backward: I + W equals B for every kind of module, no product is made twice, and memory is freed at I."""

import gc
import weakref
from collections import Counter
from itertools import product

import pytest
import torch
from stage_zoo import WIDTH, ZOO, Again, Block, Recurrent, Tied, make, reentrant_checkpoint, torch_checkpoint
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from dualpipe_lab.pp.runtime import recompute
from dualpipe_lab.pp.runtime.split_backward import SplitBackward

# Norms and convolutions have one kernel for all gradients; it is told which ones to compute, and called twice.
PRODUCTS = {
    "mm", "bmm", "addmm", "embedding_dense_backward", "gelu_backward", "tanh_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
}  # fmt: skip


class Operations(TorchDispatchMode):
    """Counts the operations that run inside."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))

    @property
    def products(self):
        return sum(number for name, number in self.count.items() if name in PRODUCTS)


def forward(module, x, first):
    x = x.clone() if first or not x.is_floating_point() else x.clone().requires_grad_()
    torch.manual_seed(1)
    output = module(x)
    return x, output if isinstance(output, tuple) else (output,)


def gradients(outputs, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(y.shape, dtype=y.dtype, generator=generator) for y in outputs]


def whole(module, x, first=False):
    """B: gradients of input and parameters, and how much work it was."""
    x, outputs = forward(module, x, first)
    with Operations() as work:
        torch.autograd.backward(outputs, gradients(outputs))
    return x.grad, [p.grad for p in module.parameters()], work


def halves(module, x, first=False, has_hooks=False):
    """I and W; between the two no parameter may have a gradient."""
    x, outputs = forward(module, x, first)
    known = {} if has_hooks is None else {"has_hooks": has_hooks}
    split = SplitBackward([get_gradient_edge(y) for y in outputs], [x] if x.requires_grad else [], **known)
    dys = gradients(outputs)
    del outputs
    with Operations() as i:
        found = split.input_grad(dys)
    assert all(p.grad is None for p in module.parameters())
    with Operations() as w:
        split.weight_grad()
    return found[0] if found else None, [p.grad for p in module.parameters()], i, w


def test_i_and_w_equal_b(subtests):
    for name, first in product(ZOO, [False, True]):
        module, x = make(name)
        if first and not list(module.parameters()):
            continue  # a first stage without parameters has no backward
        with subtests.test(name=name, first=first):
            dx, grads, *_ = halves(module, x, first)
            module.load_state_dict(make(name)[0].state_dict())  # the statistics of batch norm
            module.zero_grad()
            expected_dx, expected, _ = whole(module, x, first)
            assert (dx is None) == (expected_dx is None)
            assert dx is None or torch.equal(dx, expected_dx)
            for (label, _), ours, theirs in zip(module.named_parameters(), grads, expected, strict=True):
                assert (ours is None) == (theirs is None), label
                assert ours is None or torch.allclose(ours, theirs, rtol=1e-12, atol=1e-13), label


def test_no_product_is_made_twice(subtests):
    for name, first in product([name for name in ZOO if name not in ("no parameters", "identity")], [False, True]):
        with subtests.test(name=name, first=first):
            module, x = make(name)
            *_, i, w = halves(module, x, first)
            *_, b = whole(module, x, first)
            assert i.products + w.products == b.products
            assert w.products >= 1 or name in ("auxiliary", "convolution")  # shared with another output; one kernel


def test_i_frees_what_w_does_not_need():
    layers = [nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
    x = torch.randn(3, 4, requires_grad=True)
    y, references = x, []
    for layer in layers:
        y = layer(y)
        references.append(weakref.ref(y))  # autograd alone holds it afterwards
    split = SplitBackward([get_gradient_edge(y)], [x], has_hooks=False)
    del y
    gc.collect()
    held = [reference() is not None for reference in references]
    assert held == [True, True, False, True, False]
    split.input_grad([torch.ones(3, 4)])
    held = [reference() is not None for reference in references]
    assert held == [False, True, False, True, False]  # the inputs of linear layers
    split.weight_grad()
    assert not any(reference() is not None for reference in references)


def test_a_recomputed_region_is_computed_again_once():
    calls = []

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            calls.append(1)
            return self.two(torch.tanh(self.one(x)))

    for how in (recompute, torch_checkpoint):
        calls.clear()
        region = Counted().double()
        x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        y = how(region, x)
        split = SplitBackward([get_gradient_edge(y)], [x], has_hooks=False)
        split.input_grad([torch.ones_like(y)])
        split.weight_grad()
        assert len(calls) == 2


def test_a_reentrant_checkpoint_is_left_to_i():
    """It accumulates by itself when it is walked through, so nothing may be walked twice."""
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    module = Again(reentrant_checkpoint).double()
    found, (y,) = forward(module, x, False)
    split = SplitBackward([get_gradient_edge(y)], [found], has_hooks=False)
    (dx,) = split.input_grad(gradients([y]))
    split.weight_grad()
    ours = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    expected_dx, expected, _ = whole(module, x)
    assert torch.equal(dx, expected_dx)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


LAYERS = {
    "linear on rows": (lambda: nn.Linear(6, 6), (5, 6)),
    "layer norm": (lambda: nn.LayerNorm(6), (2, 5, 6)),
    "rms norm": (lambda: nn.RMSNorm(6), (2, 5, 6)),
    "convolution": (lambda: nn.Conv1d(6, 6, 3), (2, 6, 9)),
    "batch norm": (lambda: nn.BatchNorm1d(6), (5, 6)),
    "prelu": (lambda: nn.PReLU(), (5, 6)),
    "recurrent": (Recurrent, (3, 2, WIDTH)),
    "tied": (Tied, (3, WIDTH)),
    "block": (Block, (2, 3, WIDTH)),
    "checkpoint": (lambda: Again(torch_checkpoint), (2, 3, WIDTH)),
}
HOOKS = {
    "tensor": lambda layer, seen: layer.register_forward_hook(on_output(lambda y: y.register_hook(noted(seen, 3)))),
    "in place": lambda layer, seen: layer.register_forward_hook(on_output(lambda y: y.register_hook(in_place(seen)))),
    "node": lambda layer, seen: layer.register_forward_hook(on_output(lambda y: before_node(y, seen))),
    "retained": lambda layer, seen: layer.register_forward_hook(on_output(lambda y: seen.append(y) or y.retain_grad())),
    "forward": lambda layer, seen: layer.register_forward_hook(lambda layer, x, y: bent(y)),
    "backward": lambda layer, seen: layer.register_full_backward_hook(lambda layer, dx, dy: noted_all(seen, dx)),
    "before backward": lambda layer, seen: layer.register_full_backward_pre_hook(lambda layer, dy: noted_all(seen, dy)),
    "weight": lambda layer, seen: [p.register_hook(noted(seen, 3)) for p in layer.parameters()],
}


def bent(y):
    return tuple(map(bent, y)) if isinstance(y, tuple) else y.sin()


def on_output(put):
    return lambda layer, inputs, y: put(y[0] if isinstance(y, tuple) else y) and None


def noted(seen, factor):
    return lambda grad: seen.append(grad.clone()) or factor * grad.clamp(-0.3, 0.5)


def in_place(seen):
    def hook(grad):
        seen.append(grad.clone())
        grad.mul_(3)

    return hook


def noted_all(seen, grads):
    return tuple(None if grad is None else noted(seen, 3)(grad) for grad in grads)


def before_node(y, seen):
    y.grad_fn.register_prehook(lambda grads: noted_all(seen, grads))


def same(ours, theirs):
    return len(ours) == len(theirs) and all(
        (a is None) == (b is None) and (a is None or torch.allclose(a, b, rtol=1e-12, atol=1e-14))
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_have_their_effect_once(kind, subtests):
    """On the outputs of all layers, where W starts; a graph that is known to have hooks also calls each once."""

    def run(name, backward, *known):
        torch.manual_seed(0)
        make_layer, shape = LAYERS[name]
        module = nn.Sequential(nn.Tanh(), make_layer(), nn.Sequential(nn.Tanh())).double()
        seen = []
        for layer in module.modules():
            if list(layer.parameters(recurse=False)) or layer is module[1]:
                HOOKS[kind](layer, seen)
        dx, grads, *_ = backward(module, torch.randn(shape, dtype=torch.float64), *known)
        if kind == "retained":
            seen = [y.grad for y in seen]
        return [dx, *grads], seen

    for name, first in product(LAYERS, [False, True]):
        if name == "checkpoint" and kind == "retained":
            continue  # the second forward's tensors are other ones
        expected, expected_seen = run(name, whole, first)
        for known in (None, False):  # without a word, or with the promise that there are none
            with subtests.test(name=name, first=first, known=known):
                if known is False and (kind == "in place" or (kind == "node" and first)):
                    continue  # what W gives to a hook is one zero, expanded; a first stage's I may end before a node
                grads, seen = run(name, halves, first, known)
                assert same(grads, expected)
                assert same(seen, expected_seen) or (known is False and kind != "retained")


def test_gradients_accumulate_in_place():
    module, x = make("tied")
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.grad for parameter in module.parameters()]
    x, outputs = forward(module, x, False)
    split = SplitBackward([get_gradient_edge(y) for y in outputs], [x], has_hooks=False)
    split.input_grad(gradients(outputs))
    split.weight_grad()
    assert all(parameter.grad is old for parameter, old in zip(module.parameters(), before, strict=True))
    _, expected, _ = whole(make("tied")[0], make("tied")[1])
    assert all(torch.allclose(a, b + 1) for a, b in zip(before, expected, strict=True))


def test_an_input_that_nothing_uses_has_no_gradient():
    linear = nn.Linear(2, 2)
    unused = torch.randn(2, 2, requires_grad=True)
    y = linear(torch.ones(1, 2))
    split = SplitBackward([get_gradient_edge(y)], [unused], has_hooks=False)
    assert split.input_grad([torch.ones_like(y)]) == [None]
    split.weight_grad()
    assert linear.weight.grad is not None


def test_autocast_splits_too():
    module = nn.Sequential(Block().double().float(), nn.Linear(WIDTH, WIDTH)).eval()
    x = torch.randn(2, 3, WIDTH)

    def run(backward):
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            return backward(module, x)[1]

    assert all(torch.equal(a, b) for a, b in zip(run(halves), run(whole), strict=True))
