"""Exercises of "Gradient checkpointing": where to cut, and a recomputation of one's own.

Chapter: book/pp/gradient-checkpointing.  What is kept is counted by autograd's own hooks, gradients are compared with
a run that keeps everything, bitwise.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dualpipe_course.declared import Implement, Predict
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


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
