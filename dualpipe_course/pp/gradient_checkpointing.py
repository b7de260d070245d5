"""Exercises of "Gradient checkpointing": where to cut, a recomputation of one's own, what to forget, a stream of masks.

Chapter: book/pp/gradient-checkpointing.  What is kept is counted by autograd's own hooks, gradients are compared with
a run that keeps everything, bitwise.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

from dualpipe_course.declared import Implement, Predict, Puzzle, Repair
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import on_ranks, partial_score
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


# of the puzzle: what an operation keeps (units) and how long its forward takes (ticks)
OPERATIONS = {
    "norm 1": (2, 1),
    "qkv": (1, 12),
    "scores": (12, 5),
    "values": (4, 3),
    "projection": (1, 4),
    "norm 2": (2, 1),
    "up": (1, 16),
    "gelu": (4, 2),
    "down": (4, 16),
}
ROOM = 12
CASES = (
    "one input",
    "dropout",
    "two inputs",
    "an input without gradient",
    "whole numbers",
    "a number that is no tensor",
    "one tensor twice",
)
WIDTH, ROWS = 4, 3


def _segments(best: int, units: int, size: int, blocks: int) -> Sequence[float] | None:
    kept = blocks / size
    return None if size == best else (kept, kept + units * size, best)


def _names(answer: object) -> list[str]:
    if not isinstance(answer, (list, tuple, set)) or not all(type(name) is str for name in answer):
        raise Wrong(f"expected a list of names such as ['norm 1', 'gelu'], got {type(answer).__name__}")
    if unknown := sorted(set(answer) - set(OPERATIONS)):
        raise Wrong(f"there is no operation named {unknown[0]!r}; use {', '.join(OPERATIONS)}")
    return [name for name in OPERATIONS if name in answer]


def _ticks(names: Iterable[str]) -> int:
    return sum(OPERATIONS[name][1] for name in names)


def _least() -> int:
    needed = sum(units for units, _ in OPERATIONS.values()) - ROOM
    return min(
        _ticks(names)
        for size in range(len(OPERATIONS) + 1)
        for names in combinations(OPERATIONS, size)
        if sum(OPERATIONS[name][0] for name in names) >= needed
    )


class _Segment:
    """Layers, and what is done with them and the inputs."""

    def __init__(self, layers: "nn.Module", fn: Callable[..., Any]) -> None:
        self.layers, self.fn = layers, fn

    def __call__(self, *inputs: Any) -> Any:
        return self.fn(self.layers, *inputs)

    def named_parameters(self) -> Any:
        return self.layers.named_parameters()


def _try_case(rank: int, world_size: int, fn: Callable[..., Any], case: str) -> str | None:
    """Run one case with and without recomputation; say what differs, if anything."""
    segment, inputs = _case(case)
    expected = _run(segment, segment, inputs)
    if (problem := _too_much(fn, segment, inputs)) is not None:
        return problem
    calls: list[int] = []
    found = _run(lambda *args: fn(_counted(segment, calls), *args), segment, inputs)
    return _difference(found, expected) or _wrong_runs(len(calls), 1)


def _try_stream(rank: int, world_size: int, fn: Callable[..., Any], num_steps: int) -> str | None:
    """Run several steps with dropout; say what differs from keeping everything, if anything."""
    import torch

    blocks, other = [_segment(dropout=True), _segment(dropout=True)], _segment(dropout=True)
    start = torch.ones(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    if (problem := _too_much(fn, other, (start,))) is not None:
        return problem
    calls: list[int] = []

    def steps(run: Callable[..., Any]) -> list[list["Tensor | None"]]:
        torch.manual_seed(5)
        results = []
        for _ in range(num_steps):
            x = torch.ones(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
            run(blocks[1], run(blocks[0], x)).sum().backward()
            results.append([x.grad, *(_take(p) for block in blocks for p in block.parameters()), torch.rand(1)])
        return results

    expected = steps(lambda block, x: block(x))
    for block in blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    found = steps(fn)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True), 1):
        if not _all_equal(ours[:-1], theirs[:-1]):
            return f"the gradients of step {number} differ from a run that keeps everything"
        if not _all_equal(ours[-1:], theirs[-1:]):
            return f"after step {number} the next random number is another one"
    return _wrong_runs(len(calls), num_steps * len(blocks))


def _without_others(fn: Callable[..., Any]) -> Without:
    """The function with the recomputations of torch and of the library switched off."""
    return Without(fn, "torch.utils.checkpoint:checkpoint", "dualpipe_lab.pp.runtime.recompute:recompute")


def _counted(segment: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    def counted(*args: Any) -> Any:
        calls.append(1)
        return segment(*args)

    return counted


def _wrong_runs(number: int, num_segments: int) -> str | None:
    if number == 2 * num_segments:
        return None
    return (
        f"{num_segments} segment(s) ran {number} times, expected {2 * num_segments}: "
        "once in the forward and once in the backward"
    )


def _too_much(fn: Callable[..., Any], segment: Callable[..., Any], inputs: tuple[Any, ...]) -> str | None:
    """Say what is kept between a forward and its backward beside the inputs, by autograd or by anybody."""
    import torch

    from dualpipe_course.pp.saved import Saved, held

    before, saved = held(), Saved()
    with saved:
        y = fn(segment, *inputs)
        if not isinstance(y, torch.Tensor):
            return f"returned {type(y).__name__} instead of the segment's output"
        kept, size = saved.live, y.numel()
        graph, y = y.grad_fn, None  # the graph lives on, the output does not
    if kept > len(inputs):
        return f"autograd keeps {kept} tensors after the forward, the inputs are {len(inputs)}"
    more = held() - before
    del graph
    if more >= size:  # a number or two may tie the function to the graph
        return f"{more} numbers are held after the forward beside the inputs; the output alone has {size}"
    return None


def _segment(dropout: bool = False) -> "nn.Sequential":
    import torch
    from torch import nn

    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)]
    return nn.Sequential(*layers, *[nn.Dropout(0.5)] * dropout).double()


def _case(case: str) -> tuple[Any, tuple[Any, ...]]:
    import torch
    from torch import nn

    segment = _segment(dropout=case == "dropout")
    generator = torch.Generator().manual_seed(4)
    x, z = torch.randn(2, ROWS, WIDTH, dtype=torch.float64, generator=generator)
    x, z = x.requires_grad_(), z.clone().requires_grad_()
    if case == "two inputs":
        return _Segment(segment, lambda layers, a, b: layers(a * b) + b), (x, z)
    if case == "an input without gradient":
        return _Segment(segment, lambda layers, a, b: layers(a) * b), (x, z.detach())
    if case == "one tensor twice":
        return _Segment(segment, lambda layers, a, b: layers(a * b)), (x, x)
    if case == "whole numbers":
        embedding = nn.Embedding(7, WIDTH).double()
        return nn.Sequential(embedding, segment), (torch.tensor([1, 0, 6]),)
    if case == "a number that is no tensor":
        return _Segment(segment, lambda layers, a, scale: layers(a) * scale), (x, 3)
    return segment, (x,)


def _run(run: Callable[..., Any], segment: Any, inputs: tuple[Any, ...]) -> dict[str, "torch.Tensor | None"]:
    """Output and gradients of one run, and the random number that would come next."""
    import torch

    torch.manual_seed(6)
    tensors = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    y = run(*inputs)
    torch.rand(1)  # the stream goes on before the backward comes
    y.square().sum().backward()
    found = {"output": y.detach(), **{f"gradient of input {i}": _take(x) for i, x in enumerate(tensors)}}
    found |= {f"gradient of {name}": _take(p) for name, p in segment.named_parameters()}
    return {**found, "next random number": torch.rand(1)}


def _take(x: "Tensor") -> "Tensor | None":
    grad, x.grad = x.grad, None
    return grad


def _difference(found: dict[str, Any], expected: dict[str, Any]) -> str | None:
    for name, theirs in expected.items():
        ours = found[name]
        if ours is None and theirs is not None:
            return f"the {name} is missing"
        if not _all_equal([ours], [theirs]):
            return f"the {name} differs from a run that keeps everything"
    return None


def _all_equal(ours: list[Any], theirs: list[Any]) -> bool:
    import torch

    return all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(ours, theirs, strict=True)
    )


def _judge_function(fn: Callable[..., Any], case: Any) -> None:
    if (problem := on_ranks(_try_case, 1, _without_others(fn), case, case=case)[0]) is not None:
        raise Wrong(f"{case}: {problem}")


def _judge_what_to_forget(answer: object) -> str:
    chosen = _names(answer)
    kept = sum(units for name, (units, _) in OPERATIONS.items() if name not in chosen)
    ticks, best = _ticks(chosen), _least()
    if kept > ROOM:
        raise Wrong(f"recomputing {', '.join(chosen) or 'nothing'} keeps {kept} units, there is room for {ROOM}")
    if ticks > best:
        everything = _ticks(OPERATIONS)
        score = partial_score(ticks, everything, best)
        raise Wrong(f"it fits, for {ticks} ticks more; {best} are enough", score=score)
    return f"{kept} units kept for {ticks} more ticks of {_ticks(OPERATIONS)}"


def _judge_masks(fn: Callable[..., Any], num_steps: int) -> None:
    case = f"{num_steps} step{'s' * (num_steps > 1)}"
    if (problem := on_ranks(_try_stream, 1, _without_others(fn), num_steps, case=case)[0]) is not None:
        raise Wrong(f"{case} of two blocks with dropout: {problem}")


numbers = Predict(
    "gradient_checkpointing-1",
    "Where to cut the blocks",
    ("kept", "peak", "best length"),
    _segments,
    "has {blocks} blocks, each of which keeps {units} units",
    "In segments of {size} blocks",
    minutes=5,
    points=1,
    hints=(
        "After the forward only the inputs of the segments are there: one unit each.",
        "In the backward one segment at a time is there in full: 9 units for each of its blocks.",
        "The best length is the square root of L / kappa, if that is a whole number.",
    ),
    slips=(
        {36: "that is one input per block, not per segment"},
        {27: "the inputs of the segments are there too"},
        {3: "segments of 3 peak at 39; another length peaks at 36", 6: "it peaks at 60; there is one that peaks at 36"},
    ),
    best=(2, 3, 4),
    units=(9, 4, 5, 6, 8, 10),
    size=(3, 2, 4, 6),
    blocks=lambda best, units, **_: units * best**2,
    called={"size": "blocks of a segment"},
)

function = Implement(
    "gradient_checkpointing-2",
    "A recomputation of your own",
    "Write `recompute(segment, *inputs)`: bitwise equal to `segment(*inputs)`, keeping nothing but the inputs.",
    cases=[(case,) for case in CASES],
    judge=_judge_function,
    right=f"{len(CASES)} cases, bitwise equal, two runs per segment, only the inputs kept",
    minutes=35,
    points=4,
    hints=(
        "Make an autograd function whose forward runs the segment (no graph is recorded there) and saves its inputs, "
        "and whose backward runs it again under torch.enable_grad() on detached inputs.",
        "Detach every tensor among the inputs; one that asked for a gradient before must ask again. "
        "The backward returns one gradient per input, None where none was asked for.",
        "torch.get_rng_state() in the forward; set it before the second run, and set the present one again after it.",
    ),
)

what_to_forget = Puzzle(
    "gradient_checkpointing-3",
    "What to forget",
    "Choose the operations of one block to recompute: at most 12 units kept, as few ticks as possible.",
    judge=_judge_what_to_forget,
    minutes=10,
    points=2,
    hints=(
        "Compare units per tick: which operation frees much for little time?",
        f"Everything together keeps {sum(units for units, _ in OPERATIONS.values())} units; "
        f"at least {sum(units for units, _ in OPERATIONS.values()) - ROOM} have to go.",
        "The greedy choice by units per tick is good here; check whether its last member is needed.",
    ),
)

masks = Repair(
    "gradient_checkpointing-4",
    "The masks that come again",
    "Repair the recomputation after which the random stream goes on from the wrong place.",
    cases=((1,), (2,), (3,)),
    judge=_judge_masks,
    right="1 to 3 steps: gradients and random stream as if everything were kept",
    minutes=10,
    points=2,
    hints=(
        "One step is right. Run two in a row and compare the second with a run that keeps everything.",
        "Which random numbers does the forward after a backward draw?",
        "The second run needs the old random state. What comes afterwards needs the one that was there before it.",
    ),
)
