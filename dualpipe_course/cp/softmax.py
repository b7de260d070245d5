"""Exercises of "Softmax": gradients of a row, and a temperature that learns.

Chapter: book/cp/softmax.  Weights and gradients are judged in float64 against torch where torch has numbers, against
zero where it has none; every tensor that an answer makes is counted, so that no matrix of derivatives passes.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Unchanged
from dualpipe_course.declared import Implement, Predict
from dualpipe_course.differences import apart
from dualpipe_course.switched_off import AUTOGRAD, Without
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong
from dualpipe_lab._private import dispatch_mode
from dualpipe_lab.launch.causes import multiple

if TYPE_CHECKING:
    from torch import Tensor

LIBRARY = ("dualpipe_lab.cp.softmax", "dualpipe_lab.cp.online_softmax", "dualpipe_lab.cp.ring_softmax")
NAMES = ("gradient 0", "gradient 1", "gradient 2", "bytes forward", "bytes backward")
CASES = (
    "ordinary scores", "one column", "scores of +-8,000", "hidden scores", "a row that is hidden",
    "scores below -20,000",
)  # fmt: skip
TOLERANCE, THETA = 1e-10, 0.5
READY_MADE = ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "_safe_softmax")
Found = tuple[str, list[float], list[float], float]  # what it is, as returned, expected, largest error that passes


def _batch(case: str) -> "Tensor":
    import torch

    generator = torch.Generator().manual_seed(5)
    x = 2 * torch.randn(4, 1 if case == CASES[1] else 32, dtype=torch.float64, generator=generator)
    if case == CASES[2]:
        x[0, 3], x[1], x[2, :4] = 8000, x[1] - 8000, 8000
    if case == CASES[5]:
        x = x - 20_000
    if case in CASES[3:5]:
        x[0, ::2], x[2, 1:] = -torch.inf, -torch.inf
    if case == CASES[4]:
        x[1] = -torch.inf
    return x


def _expected(x: "Tensor", dy: "Tensor") -> "tuple[Tensor, Tensor, Tensor]":
    """Weights, gradient of the scores and of the temperature, by torch, row by row; rows without a score are 0."""
    import torch

    sees = (x > -torch.inf).any(-1)
    scale = torch.tensor(THETA, dtype=torch.float64, requires_grad=True)
    y, dx = torch.zeros_like(x), torch.zeros_like(x)
    leaf = x[sees].clone().requires_grad_()
    hidden = leaf == -torch.inf
    found = torch.softmax((leaf.masked_fill(hidden, 0) / scale).masked_fill(hidden, -torch.inf), -1)
    found.backward(dy[sees])
    assert leaf.grad is not None
    assert scale.grad is not None
    y[sees], dx[sees] = found.detach(), leaf.grad
    return y, dx, scale.grad


def _allowed(x: "Tensor", dy: "Tensor", y: "Tensor") -> tuple[float, float, float]:
    """Errors of weights, dx and dT that rounding explains in any way to write a softmax.

    A power of s - logsumexp(s) is off by the rounding of its exponent, eps |s|, relative to itself.  dT is a sum of
    terms dz x, which cancel: its error is that of the terms.
    """
    import torch

    s = (x / THETA).masked_fill(x == -torch.inf, 0)
    relative = max(TOLERANCE, 4 * torch.finfo(x.dtype).eps * float(s.abs().max()))
    terms = y * (dy.abs() + (y * dy.abs()).sum(-1, keepdim=True))
    size = max(1.0, float((terms * s.abs()).sum()) / THETA)
    return relative, relative * max(1.0, float(terms.max()) / THETA), relative * size


def _by_hand(forward: Callable[..., Any], backward: Callable[..., Any], x: "Tensor", dy: "Tensor") -> list[Any]:
    import torch

    with torch.no_grad():
        y = forward(x, THETA)
        dx, d_theta = backward(x, y, dy, THETA)
    return [y, dx, torch.as_tensor(d_theta, dtype=torch.float64)]


def _in_one(
    rank: int, world_size: int, fn: Callable[..., Any], forward: Callable[..., Any], backward: Callable[..., Any]
) -> list[tuple[str, list[Found], int, str, int, int]]:
    """Run the answer on every case: what it returned beside what is expected, the largest tensor, ready-made calls."""
    import torch

    class Sizes(dispatch_mode()):  # type: ignore[misc]
        largest, ready_made = 0, ""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            name = func.overloadpacket.__name__
            self.ready_made = name if name in READY_MADE else self.ready_made
            self.largest = max([self.largest, *(t.numel() for t in (out,) if isinstance(t, torch.Tensor))])
            return out

    results = []
    given = [(x := _batch(case), torch.linspace(-1, 2, x.numel()).double().view_as(x).sin()) for case in CASES]
    right = [_expected(x, dy) for x, dy in given]  # before autograd is switched off
    names = "the weights", "the gradient of the scores", "the gradient of the temperature"
    for case, (x, dy), expected in zip(CASES, given, right, strict=True):
        unchanged = Unchanged(scores=x, dy=dy)
        with Sizes() as sizes:
            returned = fn(forward, backward, x, dy)
        unchanged.check()
        found = [
            (name, ours.flatten().tolist(), theirs.flatten().tolist(), error)
            for name, ours, theirs, error in zip(names, returned, expected, _allowed(x, dy, expected[0]), strict=True)
        ]
        results.append((case, found, sizes.largest, sizes.ready_made, *x.shape))
    return results


def _check(case: str, found: list[Found]) -> None:
    for name, ours, theirs, allowed in found:
        if len(ours) != len(theirs):
            raise Wrong(f"{case}: {name}: {len(ours)} numbers, expected {len(theirs)}")
        wrong = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not abs(a - b) <= allowed]
        if not wrong:
            continue
        a, b = ours[wrong[0]], theirs[wrong[0]]
        what = f"is not a number, expected {b:.6g}" if a != a else apart(a, b, allowed)
        factor = multiple(ours, theirs)
        known = "" if factor is None else f"; all are {factor:.4g} times what they should be"
        raise Wrong(f"{case}: {name}: number {wrong[0]} {what}{known}")


_AVERAGE = "that is the gradient less the weighted average; the weight itself is still missing"
_DIAGONAL = "that is the diagonal of the matrix alone; each weight depends on the other scores too"
_SLIPS: list[dict[int, str]] = [
    {12: _AVERAGE, 8: _DIAGONAL, 16: "that is y dy; the weighted average of dy is subtracted first"},
    {-4: _AVERAGE, 3: _DIAGONAL, 4: "that is y dy; the weighted average of dy is subtracted first"},
    {-20: _AVERAGE, 0: "the other two scores have a gradient, and it says that this one should fall"},
    {
        6_000: "the maximum and the sum are two all-reduces",
        8_000: "those are the bytes of the numbers; an all-reduce sends 2 (N - 1) / N of them",
        3_000: "count the maximum and the sum, and for each both halves of an all-reduce",
    },
    {
        0: "the sum of y dy goes over all columns, so over all ranks",
        12_000: "the backward has one sum, not two",
        3_000: "that is the reduce-scatter; every rank needs the finished sum",
    },
]


def _judge_temperature(forward: Callable[..., Any], backward: Callable[..., Any]) -> str:
    results = on_ranks(_in_one, 1, Without(_by_hand, *LIBRARY, *AUTOGRAD), forward, backward, case="your functions")
    for case, found, largest, ready_made, rows, columns in results[0]:
        _check(case, found)
        if ready_made:
            raise Wrong(f"{case}: the numbers are right, and torch's own {ready_made} made them; write it by hand")
        if largest > 3 * rows * columns:
            raise Wrong(
                f"{case}: a tensor of {largest} numbers was made for {rows} rows of {columns}; no matrix of "
                "derivatives is needed"
            )
    return f"weights, scores and temperature are right for {len(CASES)} kinds of rows, without a matrix"


numbers = Predict(
    "softmax-1",
    "Three scores and four ranks",
    NAMES,
    lambda a, b, rows: (*((y / 4 * (g - a / 2 - b / 4)) for y, g in ((2, a), (1, b), (1, 0))), 12 * rows, 6 * rows),
    "their gradients are {a}, {b} and 0.",
    "{rows:,} longer rows",
    minutes=5,
    points=1,
    hints=(
        "The average of 32, 16 and 0, weighted with 1/2, 1/4 and 1/4, is 20. What lies above it, what below?",
        "dx is y times (dy - 20). The three gradients must add up to 0.",
        "Two all-reduces forward and one backward, each of 1,000 numbers of 4 bytes: 2 (N - 1) / N of its bytes.",
    ),
    slips=_SLIPS,
    a=(32, 16, 48, 64),
    b=(16, 32, 48, 80),
    rows=(1000, 2000, 3000, 4000),
    called={"a": "gradients", "b": ""},
)

temperature = Implement(
    "softmax-2",
    "A temperature that learns",
    "Write forward and backward of a softmax with a temperature, both by hand.",
    judge=_judge_temperature,
    minutes=20,
    points=3,
    hints=(
        "Let s be the scaled scores, x / temperature. First write ds as in the chapter; then dx and the temperature.",
        "The temperature's gradient is the sum of ds * (-x / temperature**2) over all rows and columns.",
        "A hidden score has ds = 0 and x = -inf, and their product is NaN. Its share is 0: fill x with 0 there.",
    ),
)
