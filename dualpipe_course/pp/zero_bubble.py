"""Exercises of "Zero Bubble": two parts of the trainer (late weight gradients, ZB-H1's rows), and sums.

Chapter: book/pp/zero-bubble.  Split backwards are judged word by word: results, matrix products, what is still held.
"""

import gc
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off, in_words
from dualpipe_course.declared import Repair
from dualpipe_course.own.part import Alone, OnRanks, Part
from dualpipe_course.pp import split_rows
from dualpipe_course.pp.gradients import OLD
from dualpipe_course.pp.programs import check_actions
from dualpipe_course.start.ranks import all_waited_for
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.program import B, F, I, W

if TYPE_CHECKING:
    from torch import Tensor


WIDTH, HIDDEN, WORDS = 5, 7, 6
ROWS = (3, 5, 4, 2)  # of each microbatch; of one row an einsum makes no matrix product


def _counter() -> Any:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    aten = torch.ops.aten  # in place: torch counts 0 for these
    in_place = {aten.addmm_: _operations, aten.baddbmm_: _operations, aten.addbmm_: _operations}
    return FlopCounterMode(display=False, custom_mapping=in_place)


def _operations(out: Sequence[int], a: Sequence[int], b: Sequence[int], **options: Any) -> int:
    """Of a product of these shapes that is added to `out`."""
    return 2 * prod(a) * b[-1]


def _split_case(kind: str) -> "tuple[dict[str, Tensor], Callable[..., Any]]":
    """Weights by name, and a stage's function of x that multiplies by `linear(x, weight)`."""
    import torch

    w = {"up": _normal(1, HIDDEN, WIDTH), "down": _normal(2, WIDTH, HIDDEN), "scale": _normal(3, WIDTH)}
    if kind == "words":
        w["table"] = _normal(4, WORDS, WIDTH)
    if kind == "one weight twice":
        w["down"] = _normal(2, WIDTH, WIDTH)
        return w, lambda x, linear: linear(linear(x * w["scale"], w["down"]).tanh(), w["down"])
    if kind == "no product":
        return w, lambda x, linear: torch.tanh(x * w["scale"])

    def f(x: "Tensor", linear: Any) -> "Tensor":
        x = (w["table"][x] if "table" in w else x) * w["scale"]
        return linear(torch.tanh(linear(x, w["up"])), w["down"])

    return w, f


def _normal(seed: int, *shape: int) -> "Tensor":
    import torch

    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _given_to(kind: str, m: int) -> "tuple[Tensor, Tensor]":
    """The input of a microbatch, and the gradient of its output."""
    import torch

    rows = 0 if kind == "no tokens" else ROWS[m]
    words = torch.randint(WORDS, (rows,), generator=torch.Generator().manual_seed(m))
    return (words if kind == "words" else _normal(10 + m, rows, WIDTH)), _normal(20 + m, rows, WIDTH)


def _on_a_split_stage(rank: int, world_size: int, kind: str, row: str) -> Found:
    """Call a stage in the order of the words, and count the products and numbers of I and W."""
    import torch
    from mine.column import HOOKS, linear
    from mine.later import SplitStage

    from dualpipe_course.pp.saved import held

    w, f = _split_case(kind)
    for weight in w.values():
        weight.requires_grad_().grad = torch.full_like(weight, OLD)
    stage, hook = SplitStage(lambda x: f(x, linear), w.values()), HOOKS["weight_grad"]
    given = {m: _given_to(kind, m) for m in range(len(ROWS))}
    with _counter():
        (torch.ones(1, 1) @ torch.ones(1, 1)).sum()  # torch imports much when it first counts
    held()
    gc.freeze()
    found: dict[str, Tensor | None] = {}
    saved: dict[int, Any] = {}
    left: dict[int, Any] = {}
    before = held()
    costs = {"products of I": 0.0, "products of W": 0.0, "kept": 0}
    for word in row.split():
        step, m = word[0], int(word[1:])
        x, dy = given[m]
        grads = {name: w[name].grad.clone() for name in ("up", "down")}
        with _counter() as counter:
            found |= _call_word(stage, word, x, dy, saved, left)
        if HOOKS["weight_grad"] is not hook:
            return Found({}, refused=f"after {word} HOOKS still has another function; take it out in a finally")
        if step == I and any(not w[name].grad.equal(grad) for name, grad in grads.items()):
            return Found({}, refused=f"{word} changed the gradient of a product's weight; that is what W does")
        if step in (I, W):
            spent = counter.get_total_flops() / max(2 * len(x) * WIDTH * HIDDEN, 1)
            costs[f"products of {step}"] = max(costs[f"products of {step}"], spent)
    found |= {f"gradient of {name}": weight.grad - OLD for name, weight in w.items()}
    plain = {name: Numbers.of(value) for name, value in found.items()}
    found, x, dy, grads = {}, None, None, {}
    for weight in w.values():
        weight.grad = None
    return Found(plain, costs=costs | {"kept": held() - before})


def _call_word(
    stage: Any, word: str, x: "Tensor", dy: "Tensor", saved: dict[int, Any], left: dict[int, Any]
) -> "dict[str, Tensor | None]":
    """F, B, I or W of a microbatch: what it returns, by name."""
    step, m = word[0], int(word[1:])
    if step == F:
        y, saved[m] = stage.forward(x)
        return {f"y of {m}": y}
    if step == W:
        stage.weight_grads(left.pop(m))
        return {}
    if step == B:
        dx = stage.backward(saved.pop(m), dy)
    else:
        dx, left[m] = stage.input_grad(saved.pop(m), dy)
    return {f"dx of {m}": dx} if x.is_floating_point() else {}


def _split_products(world_size: int, kind: str, row: str) -> list[Limit]:
    most = {"no product": 0.0, "one weight twice": 2 * WIDTH / HIDDEN}.get(kind, 2.0)
    words = "made {found:.3g} matrix products for a microbatch, {most:.3g} are enough: "
    return [
        Limit("products of I", most, f"an I {words}those of the weights wait for their W"),
        Limit("products of W", most, f"a W {words}it has x and dy of each product, and starts nothing anew"),
        Limit("kept", 0, "when all is done {found} numbers are kept; a W lets go of what its I has left"),
    ]


def _plain_split(rank: int, world_size: int, kind: str, row: str) -> "dict[str, Tensor]":
    import torch

    w, f = _split_case(kind)
    found = {}
    totals = {name: torch.zeros_like(weight) for name, weight in w.items()}
    for m in sorted({int(word[1:]) for word in row.split()}):
        x, dy = _given_to(kind, m)
        leaves = [weight.requires_grad_() for weight in w.values()]
        leaves += [x.requires_grad_()] if x.is_floating_point() else []
        y = f(x, torch.nn.functional.linear)
        *grads, last = torch.autograd.grad(y, leaves, dy, allow_unused=True)
        found[f"y of {m}"] = y.detach()
        if x.is_floating_point():
            found[f"dx of {m}"] = last
        else:
            grads.append(last)
        for name, grad in zip(w, grads, strict=True):
            totals[name] += 0 if grad is None else grad
    return found | {f"gradient of {name}": total for name, total in totals.items()}


def _slices(rank: int, world_size: int, num_slices: int) -> Found:
    """Experts as slices of one parameter: their gradients are there, or somebody says why not."""
    import torch
    from mine.column import HOOKS, linear
    from mine.later import SplitStage

    whole, hook = _normal(1, num_slices, WIDTH, WIDTH).requires_grad_(), HOOKS["weight_grad"]
    x, dy = _given_to("numbers", 0)
    stage = SplitStage(lambda x: sum(linear(x, whole[e]) for e in range(num_slices)), [whole])
    _, saved = stage.forward(x)
    try:
        _, left = stage.input_grad(saved, dy)
        stage.weight_grads(left)
    except Exception:
        if HOOKS["weight_grad"] is not hook:
            return Found({}, refused="I has raised, and HOOKS still has another function; take it out in a finally")
        return Found({})
    if whole.grad is None or not torch.allclose(whole.grad, (dy.T @ x).expand_as(whole)):
        return Found({}, refused="the gradient is lost without a word: a slice is no leaf, and nobody reads its .grad")
    return Found({})


def _queue_of_halves(rank: int, world_size: int, kind: str) -> Found:
    """Where the words of one microbatch, called one by one, keep what is left."""
    from mine.column import linear
    from mine.execute import KINDS, Run
    from mine.later import SplitStage

    weight = _normal(1, WIDTH, WIDTH).requires_grad_()
    stage = SplitStage(lambda x: linear(x, weight), [weight])
    run = Run({0: stage}, lambda stage, i: 0, 1, [_normal(10, 2, WIDTH)], lambda y, i: y.square().sum())
    for word in ("0F0", "0I0", "0W0"):
        KINDS[word[1]](run, word)
        if ((0, "W", 0) in run.saved) != (word == "0I0"):
            held = "nothing is" if word == "0I0" else "what its I has left is still"
            return Found({}, refused=f'after {word} {held} at run.saved[0, "W", 0]')
    return Found({})


def _split_on_ranks(rank: int, world_size: int, lengths: tuple[int, ...]) -> Found:
    """ZB-H1's row by the executor, and 1F1B's by the same stages."""
    import torch
    from mine.column import linear
    from mine.execute import execute
    from mine.later import SplitStage
    from mine.row_messages import with_messages

    w = {name: x.requires_grad_() for name, x in _weights_at(rank).items()}
    for weight in w.values():
        weight.grad = torch.full_like(weight, OLD)
    row = list(schedules.zero_bubble_h1(world_size, len(lengths)).rows())[rank]
    row = with_messages(row, rank, lambda stage, i: stage, world_size)
    stages = {rank: SplitStage(lambda x: linear(linear(x, w["up"]).tanh(), w["down"]), w.values())}
    inputs, loss = _numbers(lengths)
    losses = execute(row, stages, lambda stage, i: stage, world_size, inputs, loss)
    all_waited_for()
    found = {f"gradient of {name}, stage {rank}": weight.grad - OLD for name, weight in w.items()}
    found |= {f"loss of microbatch {i}": value for i, value in losses.items()}
    return Found({name: Numbers.of(value) for name, value in found.items()})


def _weights_at(stage: int) -> "dict[str, Tensor]":
    return {"up": _normal(30 + stage, HIDDEN, WIDTH), "down": _normal(40 + stage, WIDTH, HIDDEN)}


def _numbers(lengths: Sequence[int]) -> "tuple[list[Tensor], Callable[[Tensor, int], Tensor]]":
    inputs = [_normal(50 + i, rows, WIDTH) for i, rows in enumerate(lengths)]
    return inputs, lambda y, i: (y - _normal(70 + i, *y.shape)).square().sum() / sum(lengths)


def _accumulated(rank: int, world_size: int, lengths: tuple[int, ...]) -> "dict[str, Tensor | None]":
    import torch

    weights = [_weights_at(stage) for stage in range(world_size)]
    named = {f"gradient of {name}, stage {at}": x for at, w in enumerate(weights) for name, x in w.items()}
    inputs, loss = _numbers(lengths)
    found: dict[str, Tensor | None] = {}
    totals = {name: torch.zeros_like(x) for name, x in named.items()}
    for i, x in enumerate(inputs):
        for w in weights:
            x = (x @ w["up"].requires_grad_().T).tanh() @ w["down"].requires_grad_().T
        share = loss(x, i)
        for name, grad in zip(named, torch.autograd.grad(share, list(named.values())), strict=True):
            totals[name] += grad
        found[f"loss of microbatch {i}"] = share.detach() if rank == world_size - 1 else None
    return found | {name: total if name.endswith(f"stage {rank}") else None for name, total in totals.items()}


def _why_not_split(off: Off) -> str:
    if off.name.startswith("gradient") and off.found is not None and not off.has_other_shape:
        if all(abs(x + OLD - y) < 1e-9 for x, y in zip(off.found.flat, off.expected.flat, strict=True)):
            return f"{off.name} lacks what was there before; each W adds to it"
        if not any(off.found.flat):
            return f"nothing was added to the {off.name}: what a W is to add has to be left by the I of its microbatch"
        return f"{in_words(off)}. Is what an I leaves that of its own microbatch, whichever W comes first?"
    return in_words(off)


def _look_at_rows(p: int, m: int) -> str:
    """What is wrong with the rows of p stages and m microbatches, if anything."""
    from mine.rows_zb_h1 import zb_h1_rows

    rows = zb_h1_rows(p, m)
    if not isinstance(rows, list) or len(rows) != p or not all(isinstance(row, str) for row in rows):
        return f"expected a list of {p} texts, one row per stage"
    try:
        check_actions(rows, schedules.zero_bubble_h1(p, m), "the rows")
    except Wrong as wrong:
        return wrong.message.removeprefix("the rows: ")
    return ""


def _judge_follow(fn: Callable[..., Any]) -> str:
    if problem := on_ranks(split_rows.try_rows, 1, fn, case="calling your function")[0]:
        raise Wrong(problem)
    return f"{len(split_rows.LEGAL)} rows add up, over two steps each; {len(split_rows.ILLEGAL)} wrong ones are refused"


later = Part(
    "zero_bubble-5",
    "later",
    "Weight gradients that wait",
    "Write now_or_later and SplitStage, and add I and W to the executor's kinds.",
    names=("now_or_later", "SplitStage"),
    trials=(
        OnRanks(
            _on_a_split_stage,
            (
                (1, "numbers", "F0 I0 W0"),
                (1, "numbers", "F0 F1 I0 I1 W0 W1"),
                (1, "numbers", "F0 F1 F2 I1 W1 I0 F3 B3 I2 W2 W0"),
                (1, "words", "F0 I0 F1 I1 W1 W0"),
                (1, "one weight twice", "F0 I0 F1 I1 W0 W1"),
                (1, "no tokens", "F0 I0 W0"),
                (1, "no product", "F0 I0 W0"),
            ),
            _plain_split,
            "a stage of {1}, {2}",
            _split_products,
            _why_not_split,
        ),
        OnRanks(_slices, ((1, 2),), named="{1} slices of one parameter"),
        OnRanks(_queue_of_halves, ((1, "F I W"),), named="the words {1} one by one"),
        OnRanks(
            _split_on_ranks,
            ((1, (2,)), (2, (2, 1, 3)), (3, (1, 2, 0, 2))),
            _accumulated,
            "ZB-H1 on {0} rank(s), microbatches of {1} tokens",
            why=_why_not_split,
        ),
    ),
    right="7 orders of F, B, I and W, no product twice; ZB-H1 on 1 to 3 ranks equals one process",
    minutes=50,
    points=4,
    hints=(
        'Your linear calls HOOKS["weight_grad"](weight, x, dy) in its backward, and returns what that returns. What '
        "if the function that is there for the time of an I writes the three down, and returns None?",
        "Each I needs a list of its own: the W of another microbatch may come first. now_or_later(left) returns a "
        "function that appends to left. W is then a loop over the list: dy.t() @ x, added to weight.grad.",
        'left = []; before, HOOKS["weight_grad"] = HOOKS["weight_grad"], now_or_later(left); try: return '
        'self.backward(saved, dy), left; finally: HOOKS["weight_grad"] = before. run_i keeps left at '
        'run.saved[stage, "W", i]; and KINDS.update(I=run_i, W=run_w).',
    ),
)

rows_zb_h1 = Part(
    "zero_bubble-6",
    "rows_zb_h1",
    "ZB-H1 as text",
    "Write zb_h1_rows(p, m).",
    names=("zb_h1_rows",),
    trials=(Alone(_look_at_rows, ((1, 1), (2, 1), (2, 3), (4, 2), (4, 3), (4, 8), (6, 4), (8, 24)), "p = {}, m = {}"),),
    right="8 sizes, fewer microbatches than stages among them",
    minutes=30,
    points=3,
    hints=(
        "Begin with 1F1B: p - 1 - s forwards, never more than there are microbatches, and then for every microbatch "
        "the next forward, if there is one, and its backward. Which words does the B become, and when?",
        "Each backward step i is I_i, and W of the microbatch s steps before it, if there is one yet. After the last I "
        "s weight gradients are left, or m if there are fewer.",
        'for i in range(m): words += [f"F{warmup + i}"] * (warmup + i < m) + [f"I{i}"] + [f"W{i - s}"] * (i >= s). '
        "Then the W from max(m - s, 0) to m - 1.",
    ),
)


follow = Repair(
    "zero_bubble-4",
    "Only the last one counts",
    "Repair `follow(stage, row, inputs, dys)`, which replaces gradients and mixes up microbatches.",
    judge=_judge_follow,
    minutes=15,
    points=2,
    trail=True,
    hints=(
        "Run F0 I0 W0 F1 I1 W1 and compare with the two gradients alone: which one do you get?",
        "Run F0 I0 F1 I1 W0 W1. Which microbatch's gradient does W0 start from?",
        "Keep each microbatch's dy under its number, from I to W. If none is there, the W has come too early.",
    ),
)
