"""Judging a backward split by hand: after every call its result, its matrix products, and what is still held.

In: a class with `forward`, `input_grad` and `weight_grad`, and words such as `F0 I0 W0`.  Out: what is wrong after the
first call after which anything is, or an empty string.  All numbers are small whole ones, so every sum is exact.
  products     2 rows D H operations each, at most two per call, counted by torch's own counter
  held         floating-point numbers of live tensors, beyond those before the first call
"""

import gc
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from dualpipe_lab.pp.program import F, I, W

if TYPE_CHECKING:
    from torch import Tensor

WIDTH, HIDDEN = 5, 7
ROWS = (3, 5, 4, 2)  # of each microbatch; of one row an einsum makes no matrix product
CASES = (
    "F0 I0 W0",
    "F0 I0 W0 F1 I1 W1",
    "F0 F1 I0 I1 W1 W0",
    "F0 F1 F2 I1 W1 I0 F3 I3 W3 W0 I2 W2",
    "F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3",
)


def try_cases(rank: int, world_size: int, cls: Callable[..., Any]) -> str:
    """Call the learner's class word by word, case by case; say what is wrong first."""
    with _counter():
        _truth(0)  # torch imports much when it first counts
    gc.collect()
    gc.freeze()  # what is there already need not be looked through after every call
    return next(filter(None, (_try_case(cls, case) for case in CASES)), "")


def _try_case(cls: Callable[..., Any], case: str) -> str:
    from dualpipe_course.pp.saved import held

    w1, w2 = _weights()
    ours, kept_before = cls(w1, w2), held()
    words = case.split()
    for position, word in enumerate(words):
        where = f"after {' '.join(words[: position + 1])}"
        result, products, changed = _call(ours, word)
        if changed:
            return f"{where}: {changed} was changed in place; it belongs to somebody else"
        if problem := _values(word, result, ours, words[: position + 1]):
            return f"{where}: {problem}"
        if products > 2:
            return f"{where}: {word} made {products:.4g} matrix products, 2 are enough: {_WORK[word[0]]}"
        del result
        if problem := _too_much(held() - kept_before, words[: position + 1]):
            return f"{where}: {problem}"
    return ""


_WORK = {
    F: "one per layer",
    I: "dy W2, and da W1; the weights' gradients wait for W",
    W: "one per weight; everything else is there from the forward and from I",
}


def _call(ours: Any, word: str) -> tuple[Any, float, str]:
    """One call: its result, its matrix products, and the name of a given tensor that it changed."""
    kind, m = word[0], int(word[1:])
    given = {F: _input, I: _output_grad}.get(kind)
    arguments = [] if given is None else [given(m)]
    method = {F: ours.forward, I: ours.input_grad, W: ours.weight_grad}[kind]
    with _counter() as counter:
        result = method(m, *arguments)
    changed = ""
    if given is not None and not _same(arguments[0], given(m)):
        changed = "x" if kind == F else "dy"
    if not all(map(_same, (ours.w1, ours.w2), _weights())):
        changed = "a weight"
    return result, counter.get_total_flops() / (2 * ROWS[m] * WIDTH * HIDDEN), changed


def _counter() -> Any:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    aten = torch.ops.aten  # in place: torch counts 0 for these
    in_place = {aten.addmm_: _operations, aten.baddbmm_: _operations, aten.addbmm_: _operations}
    return FlopCounterMode(display=False, custom_mapping=in_place)


def _operations(out: Sequence[int], a: Sequence[int], b: Sequence[int], **options: Any) -> int:
    """Of a product of these shapes that is added to `out`."""
    return 2 * prod(a) * b[-1]


def _values(word: str, result: Any, ours: Any, words: list[str]) -> str:
    import torch

    kind, m = word[0], int(word[1:])
    y, dx, _ = _truth(m)
    if kind != W:
        expected, name = (y, "y") if kind == F else (dx, "the gradient of x")
        if not isinstance(result, torch.Tensor):
            return f"{word} returned {type(result).__name__}, expected {name}"
        if not _same(result, expected):
            w1, w2 = _weights()
            if kind == I and _same(result, _output_grad(m) @ w2 @ w1):
                return "the gradient of x went through the ReLU unchanged; where h is 0, it stops"
            return f"{name} differs from autograd's"
    return _weight_grads(ours, [int(w[1:]) for w in words if w[0] == W])


def _weight_grads(ours: Any, done: list[int]) -> str:
    for name, index in (("dw1", 0), ("dw2", 1)):
        found, zero = getattr(ours, name), _weights()[index] * 0
        expected = sum((_truth(m)[2][index] for m in done), start=zero)
        if _same(found, expected):
            continue
        if len(done) > 1 and _same(found, _truth(done[-1])[2][index]):
            return f"{name} is the gradient of microbatch {done[-1]} alone; each W adds to what is there"
        if not done:
            return f"{name} has changed before the first W"
        return f"{name} is not autograd's, summed over the microbatches whose W has run"
    return ""


def _too_much(held: int, words: list[str]) -> str:
    per_row = {F: WIDTH + HIDDEN, I: 2 * (WIDTH + HIDDEN), W: 0}
    kept = {int(word[1:]): per_row[word[0]] * ROWS[int(word[1:])] for word in words}
    if held <= sum(kept.values()):
        return ""
    kind, m = words[-1][0], int(words[-1][1:])
    needed = {F: "x and h", I: "x, h, da and dy", W: "nothing"}[kind]
    return f"{held} numbers are held, {sum(kept.values())} are enough; microbatch {m} needs {needed} from here on"


def _truth(m: int) -> tuple["Tensor", "Tensor", tuple["Tensor", "Tensor"]]:
    """Autograd's y, gradient of x, and gradients of the weights, of one microbatch."""
    import torch

    w1, w2 = (w.requires_grad_() for w in _weights())
    x = _input(m).requires_grad_()
    y = torch.relu(x @ w1.T) @ w2.T
    dx, dw1, dw2 = torch.autograd.grad(y, (x, w1, w2), _output_grad(m))
    return y.detach(), dx, (dw1, dw2)


def _weights() -> tuple["Tensor", "Tensor"]:
    return _draw(1, HIDDEN, WIDTH), _draw(2, WIDTH, HIDDEN)


def _input(m: int) -> "Tensor":
    return _draw(10 + m, ROWS[m], WIDTH)


def _output_grad(m: int) -> "Tensor":
    return _draw(20 + m, ROWS[m], WIDTH)


def _draw(seed: int, *shape: int) -> "Tensor":
    import torch

    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double()


def _same(a: Any, b: Any) -> bool:
    import torch

    return isinstance(a, torch.Tensor) and torch.equal(a, b)
