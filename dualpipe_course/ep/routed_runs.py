"""Runs of a router for checks: the loads that it counts in a step, which may be recomputed; a bias after a step."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

SPEED, NUM_EXPERTS, HIDDEN = 0.125, 6, 4


class Step(NamedTuple):
    """Microbatches by rank; the pairs of experts that the tokens of the step choose, or None: any."""

    counts: tuple[int, ...]
    choices: tuple[tuple[int, int], ...] | None = None

    def __str__(self) -> str:
        level = "" if self.choices is None else ", loads that are one apart"
        return f"{len(self.counts)} rank(s) with {', '.join(map(str, self.counts))} microbatches{level}"


# what happens to a router's microbatches, one after the other
PASSES: tuple[tuple[str, ...], ...] = (
    ("train",),
    ("train", "train"),
    ("evaluate", "train"),
    ("train", "forget"),
    ("checkpoint",),
    ("reentrant checkpoint",),
    ("checkpoint", "evaluate", "train", "reentrant checkpoint", "forget"),
)


def loads(rank: int, world_size: int, router: Callable[..., Any], case: Sequence[str]) -> tuple[Any, Any, str]:
    """The load that a router counts in these microbatches, that of those that a backward came through, and a fault."""
    import torch
    from torch.utils.checkpoint import checkpoint

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(NUM_EXPERTS, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    bias = torch.linspace(-0.4, 0.4, NUM_EXPERTS, dtype=torch.float64)
    made, expected = router(weight, bias.clone()), torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    fault = ""
    for number, way in enumerate(case):
        x = torch.randn(5 + number, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()

        def layer(x: "Tensor") -> "Tensor":
            nonlocal fault
            own, indices = made(x)
            fault = fault or _fault_of((x @ weight.T).sigmoid(), bias, own, indices)
            return (own * indices).sum(1) ** 2

        with torch.set_grad_enabled(way != "evaluate"):
            y = layer(x) if "checkpoint" not in way else checkpoint(layer, x, use_reentrant=way != "checkpoint")
        if way not in ("evaluate", "forget"):
            y.sum().backward()
            chosen = ((x @ weight.T).sigmoid() + bias).topk(2).indices
            expected += chosen.flatten().bincount(minlength=NUM_EXPERTS)
    return made.load.tolist(), expected.tolist(), fault


def _fault_of(scores: "Tensor", bias: "Tensor", weights: "Tensor", indices: "Tensor") -> str:
    """What is wrong with what a router returned: the choice, or weights that contain the bias."""
    if not (scores + bias).topk(2).indices.sort(1).values.equal(indices.sort(1).values):
        return "a token goes to other experts than the two with the largest sums of score and bias"
    chosen = scores.gather(1, indices)
    if weights.shape != chosen.shape or not weights.allclose(chosen / chosen.sum(1, keepdim=True), rtol=1e-12):
        return "the weights are not the two scores over their sum; the bias helps to choose and is no part of a weight"
    return ""


def _microbatches(rank: int, step: Step) -> list["Tensor"]:
    import torch

    if step.choices is not None:  # the tokens of the whole step, dealt out to its microbatches in turn
        first, total = sum(step.counts[:rank]), sum(step.counts)
        parts = [step.choices[number::total] for number in range(first, first + step.counts[rank])]
        return [torch.stack([_choosing(pair) for pair in part]) for part in parts]
    generator = torch.Generator().manual_seed(100 + rank)
    common = torch.randn(NUM_EXPERTS, generator=generator, dtype=torch.float64)
    shapes = [(5 + number, NUM_EXPERTS) for number in range(step.counts[rank])]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) + common for shape in shapes]


def _choosing(pair: tuple[int, int]) -> "Tensor":
    """A token that chooses these experts with a router that is the identity, whatever the bias."""
    import torch

    x = torch.full((NUM_EXPERTS,), -40.0, dtype=torch.float64)
    x[list(pair)] = 40.0
    return x


def _new_router(router: Callable[..., Any], step: Step) -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(NUM_EXPERTS, NUM_EXPERTS, generator=generator, dtype=torch.float64)
    if step.choices is not None:
        weight = torch.eye(NUM_EXPERTS, dtype=torch.float64)
    return router(weight, torch.linspace(-0.4, 0.4, NUM_EXPERTS, dtype=torch.float64))


def moved(
    rank: int, world_size: int, router: Callable[..., Any], fn: Callable[..., Any], step: Step
) -> tuple[list[float], int]:
    """This rank's bias after a step, and how many messages it took part in."""
    from dualpipe_lab.launch.context import rank_context

    made = _new_router(router, step)
    fn(made, _microbatches(rank, step), SPEED)
    return made.bias.tolist(), sum(entry.count for entry in rank_context().ledger.entries.values())


def plain_move(router: Callable[..., Any], step: Step) -> tuple["Tensor", "Tensor", "Tensor"]:
    """The bias before and after the step, and the load of the step."""
    import torch

    made = _new_router(router, step)
    start = made.bias.clone()
    load = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    for rank in range(len(step.counts)):
        for x in _microbatches(rank, step):
            load += made.load_of(x)
    return start, start + SPEED * torch.sign(load.sum() - NUM_EXPERTS * load), load
