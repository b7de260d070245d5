"""Exercises of "DualPipe: overlap": a pair with slow all-reduces, and W behind the last of them.

Chapter: book/pp/dualpipe-overlap.  Gradients are judged against one process, the pair by model time.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, compare_on_ranks
from dualpipe_course.declared import Implement, Predict

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("one after the other", "forward first", "backward first", "backward alone")
_SLIPS: tuple[dict[int, str], ...] = (
    {54: "that is the work alone; each of the six all-reduces is waited for", 78: "the forward has all-reduces too"},
    {
        54: "that is the work alone; a wait of 8 ms is left at the end, and shorter ones before",
        62: "the forward's 6 ms are shorter than the 8 ms of an all-reduce, so the backward waits in between",
        102: "that is one after the other",
    },
    {
        66: "the forward's all-reduce is the last one now, and it is launched while the backward's is under way",
        62: "the forward's 6 ms are shorter than the 8 ms of an all-reduce, so the backward waits in between",
        54: "that is the work alone",
    },
    {
        60: "that is with W before the launch",
        36: "W is shorter than the all-reduce: 2 ms of each are left to wait for",
        54: "W hides 6 of the 8 ms",
    },
)
F_MS, I_MS, W_MS, TRAVEL_MS = 6, 6, 6, 8
WIDTH, ROWS = 4, 3
LAYERS = ((1, 1), (3, 3), (1, 3), (4, 2))  # of the forward's stage, of the backward's stage
_TICKS = (
    "all gradients are right, and the pair takes {found:g} ms, {most:g} will do: a travel begins after I, W hides it, "
    "and a half goes on while the other one's tensor travels"
)
_CALLS = "rank {rank} computed W {found:g} times, its stage has {most:g} layers"


def _three_layers(f: int, b: int, travel: int, i: int) -> Sequence[int] | None:
    def in_turn(*pieces: int) -> int:
        free = link = 0
        there = [0, 0]  # when the travel of each half is over
        for _ in range(3):
            for half, ms in enumerate(pieces):
                free = max(free, there[half]) + ms
                there[half] = link = max(link, free) + travel
        return max(there)

    return 3 * (f + b + 2 * travel), in_turn(f, b), in_turn(b, f), 3 * (i + max(travel, b - i))


def _ms_of_pair(down: int, up: int) -> float:
    """Model time of the two halves in turn: one row of work, one of travel."""
    clock = free = 0
    arrived, left = [0, 0], [down, up]
    for place in _turns(down + 1, up + 1):
        clock = max(clock, arrived[place])
        if left[place]:
            left[place] -= 1
            clock += (F_MS, I_MS)[place]
            free = arrived[place] = max(free, clock) + TRAVEL_MS
            clock += (0, W_MS)[place]
    return clock + 0.01  # of the link's bandwidth


def _turns(down: int, up: int) -> Iterator[int]:
    for turn in range(max(down, up)):
        yield from [0] * (turn < down) + [1] * (turn < up)


class Half:
    """Half of a layer's hidden features on one rank; the other rank has the rest."""

    def __init__(self, layer: int, rank: int) -> None:
        import torch

        draw = torch.Generator().manual_seed(10 * layer + rank)
        shapes = (2 * WIDTH, WIDTH), (WIDTH, 2 * WIDTH)
        self.weights = [torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_() for s in shapes]
        self.grads: list[list[Tensor]] = []

    def part(self, x: "Tensor") -> "Tensor":
        """This rank's part of the layer's output."""
        up, down = self.weights
        part: Tensor = (x @ up.t()).tanh() @ down.t()
        return part

    def forward(self, x: "Tensor", ms: float = F_MS) -> "Tensor":
        """The same, kept for the backward."""
        from dualpipe_lab.launch.context import compute

        self.x = x.detach().requires_grad_()
        self.y = self.part(self.x)
        compute(ms, "F")
        return self.y.detach().clone()

    def input_grad(self, dy: "Tensor") -> "Tensor":
        """This rank's part of the gradient of the layer's input."""
        import torch

        from dualpipe_lab.launch.context import compute

        self.dy = dy.detach().clone()
        compute(I_MS, "I")
        return torch.autograd.grad(self.y, self.x, self.dy, retain_graph=True)[0]

    def weight_grad(self) -> None:
        """Add the gradient of the weights."""
        import torch

        from dualpipe_lab.launch.context import compute

        compute(W_MS, "W")
        self.grads.append(list(torch.autograd.grad(self.y, self.weights, self.dy, retain_graph=True)))


def _forward(layers: list[Half], x: "Tensor", ms: float = F_MS) -> Iterator["Tensor | None"]:
    from dualpipe_lab import comm

    for layer in layers:
        total = layer.forward(x, ms)
        work = comm.all_reduce(total, async_op=True)
        yield None
        assert work is not None
        work.wait()
        x = x + total
    yield x


def _pair(rank: int, world_size: int, backward_pieces: Any, in_turn: Any, down: int, up: int) -> Found:
    import torch

    from dualpipe_lab import comm
    from dualpipe_lab.launch.context import now

    group = comm.new_group([0, 1])
    below = [[Half(layer, r) for r in (0, 1)] for layer in range(down)]
    above = [[Half(layer, r) for r in (0, 1)] for layer in range(5, 5 + up)]
    draw = torch.Generator().manual_seed(1)
    x, z, dy = torch.randn(3, ROWS, WIDTH, generator=draw, dtype=torch.float64)
    y, leaf = x, z.clone().requires_grad_()
    for both in below:
        y = y + both[0].part(y) + both[1].part(y)
    top = leaf
    for both in above:
        top = top + both[0].part(top) + both[1].part(top)
    mine = [both[rank] for both in above]
    dx, *right = torch.autograd.grad(top, [leaf, *(w for half in mine for w in half.weights)], dy)
    *_, _ = _forward(mine, z, 0)
    start = now()
    found = in_turn(_forward([both[rank] for both in below], x), backward_pieces(mine, dy.clone(), group))
    ms = (now() - start) / 1e6
    calls = sum(len(half.grads) for half in mine)
    grads = [sum(parts) for half in mine for parts in zip(*half.grads, strict=True)]
    if not isinstance(found, tuple) or len(found) != 2:
        return Found({}, refused="in_turn returns two tensors, what each half yields last")
    names = ("what the forward yields last", "the gradient of the input", "the weights' gradients")
    expected = (y, dx, torch.cat([g.flatten() for g in right]))
    all_grads = torch.cat([g.flatten() for g in grads]) if grads else None
    values = {name: Numbers.of(value) for name, value in zip(names, (*found, all_grads), strict=True)}
    return Found(
        values,
        {name: Numbers.of(value) for name, value in zip(names, expected, strict=True)},
        costs={"W": calls, "ms": ms},
    )


def _judge_pair(backward_pieces: Callable[..., Any], in_turn: Callable[..., Any]) -> str:
    from dualpipe_lab.launch.emulator import Link

    for down, up in LAYERS:
        compare_on_ranks(
            _pair,
            2,
            backward_pieces,
            in_turn,
            down,
            up,
            case=f"{down} layer(s) forward, {up} backward",
            limits=[
                Limit("W", up, _CALLS, least=up, scope="each"),
                Limit("ms", _ms_of_pair(down, up), _TICKS, scope="largest", shows=True),
            ],
            clock="virtual",
            link=Link(gbps=1e6, latency_ms=TRAVEL_MS / 2),
        )
    return f"{len(LAYERS)} pairs have the gradients of one process and wait no longer than their all-reduces make them"


numbers = Predict(
    "dualpipe_overlap-1",
    "Slow all-reduces",
    NAMES,
    _three_layers,
    "computes {f} ms in the forward and {b} ms in the backward, and an all-reduce takes {travel} ms",
    "I takes {i} of its {b} ms",
    minutes=10,
    points=2,
    hints=(
        "Write two rows for the pair: what the rank computes, and what travels. A piece begins when the travel of its "
        "own half is over.",
        "Forward first: F from 0 to 6, B from 6 to 18, F from 18 to 24, and the second B needs what travels until 26.",
        "Backward first: the forward's travel is launched at 18 and begins at 20, when the backward's is over.",
    ),
    slips=_SLIPS,
    f=(6, 5, 7),
    b=(12, 10, 14),
    travel=(8, 9, 10),
    i=lambda b, **_: b // 2,
    called={"f": "forward", "b": "backward", "travel": "all-reduce", "i": "I"},
)

pair = Implement(
    "dualpipe_overlap-2",
    "W behind the last travel",
    "Write `backward_pieces(layers, dy, pair)`, with W behind the travel, and `in_turn` for halves of any lengths.",
    judge=_judge_pair,
    minutes=20,
    points=3,
    hints=(
        "What does the next layer below need: the input's gradient, the weight's, or both?",
        "I, launch, W, yield, wait. Then the gradient for the layer below is dy plus the sum.",
        "next(half) runs one piece; StopIteration says that a half has ended. The other one goes on alone.",
    ),
)
