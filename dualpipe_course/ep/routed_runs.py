"""Runs of a router for checks: the loads that it counts in a step, which may be recomputed."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SPEED, NUM_EXPERTS, HIDDEN = 0.125, 6, 4


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
