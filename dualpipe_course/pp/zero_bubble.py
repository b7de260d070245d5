"""Exercises of "Zero Bubble": idle times where W is long, a split backward by hand, less room, gradients that add up.

Chapter: book/pp/zero-bubble.  Split backwards are judged word by word: results, matrix products, what is still held.
"""

import gc
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from dualpipe_course.declared import Implement, Predict, Puzzle, Repair
from dualpipe_course.pp import split_rows
from dualpipe_course.pp.programs import parse
from dualpipe_course.trial import on_ranks, partial_score
from dualpipe_course.variants import Known
from dualpipe_course.wrong import Wrong
from dualpipe_lab.pp.program import F, I, W
from dualpipe_lab.pp.simulator import simulate

if TYPE_CHECKING:
    from torch import Tensor


NUMBERS = ("idle ticks of ZB-H1", "idle ticks of ZB-H2", "ticks of a step without barriers")
# of the puzzle, all ticks 1
RANKS, MICROBATCHES, ROOM, TICKS, SLOWEST = 4, 6, (4, 3, 3, 3), 22, 27
WIDTH, HIDDEN = 5, 7
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
