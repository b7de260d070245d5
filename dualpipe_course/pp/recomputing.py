"""Judging recomputation: gradients bit by bit, runs of the segment, what is kept meanwhile, and the random stream.

kept    tensors that autograd saves, by its own hooks; numbers in any other tensor that is alive, by the collector
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpipe_course.switched_off import Without

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


class _Segment:
    """Layers, and what is done with them and the inputs."""

    def __init__(self, layers: "nn.Module", fn: Callable[..., Any]) -> None:
        self.layers, self.fn = layers, fn

    def __call__(self, *inputs: Any) -> Any:
        return self.fn(self.layers, *inputs)

    def named_parameters(self) -> Any:
        return self.layers.named_parameters()


def try_case(rank: int, world_size: int, fn: Callable[..., Any], case: str) -> str | None:
    """Run one case with and without recomputation; say what differs, if anything."""
    segment, inputs = _case(case)
    expected = _run(segment, segment, inputs)
    if (problem := _too_much(fn, segment, inputs)) is not None:
        return problem
    calls: list[int] = []
    found = _run(lambda *args: fn(_counted(segment, calls), *args), segment, inputs)
    return _difference(found, expected) or _wrong_runs(len(calls), 1)


def try_stream(rank: int, world_size: int, fn: Callable[..., Any], num_steps: int) -> str | None:
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


def without_others(fn: Callable[..., Any]) -> Without:
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
