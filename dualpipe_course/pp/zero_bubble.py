"""Exercises of "Zero Bubble": idle times where W is long, a split backward by hand, less room, gradients that add up.

Chapter: book/pp/zero-bubble.  Split backwards are judged word by word: results, matrix products, what is still held.
"""

import gc
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off, in_words
from dualpipe_course.declared import Implement, Predict, Puzzle, Repair
from dualpipe_course.own.part import Alone, OnRanks, Part
from dualpipe_course.pp import split_rows
from dualpipe_course.pp.gradients import OLD
from dualpipe_course.pp.programs import check_actions, parse
from dualpipe_course.start.ranks import all_waited_for
from dualpipe_course.trial import on_ranks, partial_score
from dualpipe_course.variants import Known
from dualpipe_course.wrong import Wrong
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.program import B, F, I, W
from dualpipe_lab.pp.simulator import simulate

if TYPE_CHECKING:
    from torch import Tensor


NUMBERS = ("idle ticks of ZB-H1", "idle ticks of ZB-H2", "ticks of a step without barriers")
# of the puzzle, all ticks 1
RANKS, MICROBATCHES, ROOM, TICKS, SLOWEST = 4, 6, (4, 3, 3, 3), 22, 27
WIDTH, HIDDEN, WORDS = 5, 7, 6
LEAST = 2.0**-16  # the step between hidden numbers of the first feature, 1.5e-5
ROWS = (3, 5, 4, 2)  # of each microbatch; of one row an einsum makes no matrix product
CASES = (
    "F0 I0 W0",
    "F0 I0 W0 F1 I1 W1",
    "F0 F1 I0 I1 W1 W0",
    "F0 F1 F2 I1 W1 I0 F3 I3 W3 W0 I2 W2",
    "F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3",
)


def _idle(f: int, i: int, w: int, h1: int, h2: int) -> Sequence[int] | None:
    if not max(f, i) < w or not min(h1, h2) > 0:
        return None
    step = 8 * (f + i + w) + 3 * max(0, i - f, f + i - 2 * w)
    return 3 * (f + i) - 3 * min(i, f, w), 3 * (f + i) - min(3 * i, 6 * f, 6 * w), step


def _slips(f: int, i: int, w: int, h1: int, h2: int) -> Known:
    answers = _idle(f, i, w, h1, h2)
    assert answers is not None
    idle_h1, idle_h2, _ = answers
    work = 8 * (f + i + w)
    longer = "a tick" if i - f == 1 else f"{i - f} ticks"
    is_longer = "I is longer than F here, so " if i > f else ""
    return (
        (
            (
                h1,
                "that is the published form; while a rank waits for the first gradient to climb, "
                "no W is there to fill in",
            ),
            (
                3 * (f + i),
                f"that is the wait of a split backward that moves no W; three W of {w} ticks each can be moved into it",
            ),
            (
                3 * min(f, i),
                "no W enters the wait for F or for I; the longer of the two is left over, once per boundary",
            ),
            (3 * (f + i + w), "that is 1F1B's"),
        ),
        (
            (-h2, "no idle time is less than nothing"),
            (0, "zero only without a barrier, and only if I is not longer than F or W by too much"),
            (
                3 * max(0, i - f),
                "that is the idle time inside a row; with a barrier the shifted starts and ends count too",
            ),
            (idle_h1, f"that is H1's; {is_longer}room for 7 helps with a barrier too"),
        ),
        (
            (work, f"this is one rank's work; I is {longer} longer than F, and nothing fills that difference"),
            (work + idle_h2, "that is a step with a barrier"),
            (work + idle_h1, "that is a step of H1"),
        ),
    )


def _try_cases(rank: int, world_size: int, cls: Callable[..., Any]) -> str:
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
            return f"{where}: {changed} was changed in place; it belongs to the caller"
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
            if kind == I:
                return f"{name} differs from autograd's; where h is 0, it stops, and where h is {LEAST:.1g}, it passes"
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
    w1 = _draw(1, HIDDEN, WIDTH)
    w1[0] *= LEAST  # a small hidden number is not 0, and a power of 2 leaves all sums exact
    return w1, _draw(2, WIDTH, HIDDEN)


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


def _judge_split(cls: Callable[..., Any]) -> str:
    if problem := on_ranks(_try_cases, 1, cls, case="calling your class")[0]:
        raise Wrong(problem)
    return f"{len(CASES)} orders: equal bit by bit, two products per call, nothing held after W"


def _judge_less_room(answer: object) -> str:
    timeline = simulate(parse(answer, RANKS, MICROBATCHES))
    held = [timeline.peak_activations(rank) for rank in range(RANKS)]
    for rank, (number, room) in enumerate(zip(held, ROOM, strict=True)):
        if number > room:
            raise Wrong(
                f"{timeline.makespan} ticks, but rank {rank} holds {number} activations and has room for {room}; "
                "an activation is held until its W",
                picture=timeline,
            )
    if timeline.makespan > TICKS:
        raise Wrong(
            f"it fits, with {timeline.makespan} ticks; {TICKS} are possible",
            score=partial_score(timeline.makespan, SLOWEST, TICKS),
            picture=timeline,
        )
    return f"{timeline.makespan} ticks with {sum(held)} activations; 1F1B takes 27 with 10, ZB-H1 21 with 16"


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

numbers = Predict(
    "zero_bubble-1",
    "W is the longest",
    NUMBERS,
    _idle,
    "F takes {f} ticks, I takes {i} and W takes {w}.",
    "of {h1} ticks for ZB-H1 and of \N{MINUS SIGN}{h2} for ZB-H2",
    minutes=15,
    points=1,
    trail=True,
    hints=(
        "The chapter's form for any room K: (p-1)(t_F+t_I) - min{(min(K,p)-1) t_I, (K-1) t_F, (K-1) t_W}.",
        "H1 has room for K = p = 4, H2 for K = 7. Which of the three terms is the least, each time?",
        "Without barriers the local bubble counts, the idle time inside a row: "
        "(p-1) max{0, t_I - t_F, t_F + t_I - 2 t_W}. Or simulate 3 steps with "
        "dualpipe_lab.pp.repeat.simulate_steps, and 4; what does the fourth add?",
    ),
    slips=_slips,
    f=(2, 3, 4, 5),
    i=(3, 4, 5, 6),
    w=(4, 5, 6, 7, 8, 9),
    h1=lambda f, i, w: 3 * (f + i - w),
    h2=lambda f, i, w, **_: 3 * (2 * w - f - i),
    called={"f": "F", "i": "I", "w": "W", "h1": "published form for ZB-H1", "h2": "for ZB-H2 minus"},
)

split = Implement(
    "zero_bubble-2",
    "Two layers, six products",
    "Write an MLP with ReLU whose backward comes in two calls, each of two matrix products.",
    judge=_judge_split,
    minutes=30,
    points=4,
    hints=(
        "With a = x W1^T, h = relu(a): da = dy W2 where h > 0 and zero elsewhere, dx = da W1. That is I.",
        "dW2 = dy^T h and dW1 = da^T x. So W needs x, h, da and dy, and I has already made da.",
        "Keep a tuple per microbatch in self.kept: (x, h) after the forward, (x, h, da, dy) after I; W pops it. "
        "The mask follows from h, so a is not kept.",
    ),
)

less_room = Puzzle(
    "zero_bubble-3",
    "Less room than H1",
    "Find a program for 4 ranks and 6 microbatches: 22 ticks, activations within 4, 3, 3 and 3.",
    judge=_judge_less_room,
    minutes=40,
    points=3,
    hints=(
        "Write I and W in place of each B first: 24 ticks, and the memory of 1F1B. Why is it quicker already?",
        "Rank 3 waits for no rank but rank 2. Let its W wait while it has room, so that its I come sooner.",
        "Ranks 0 and 1 may keep 1F1B's order, each I followed by its W. Rank 2 starts with three forwards. Rank 3 runs "
        "F0 I0 F1 I1, and at the end leaves three W for after its last I.",
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
