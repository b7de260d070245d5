"""Runs of a router for checks: what it chooses and weighs, beside one token at a time; a bias after a step on ranks."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.differences import TOLERANCE

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


def routed(
    rank: int, world_size: int, fn: Callable[..., Any], cases: Sequence[tuple[Any, ...]]
) -> list[dict[str, Any]]:
    """What `route` gives and which gradients it leaves, for each case of seed, tokens, k and scale."""
    import torch

    found = []
    for seed, num_tokens, k, scale in cases:
        generator = torch.Generator().manual_seed(seed)
        x, router, grad = (
            torch.randn(*shape, generator=generator, dtype=torch.float64)
            for shape in ((num_tokens, HIDDEN), (NUM_EXPERTS, HIDDEN), (num_tokens, k))
        )
        x.requires_grad_(), router.requires_grad_()
        bias = torch.linspace(-0.6, 0.6, NUM_EXPERTS, dtype=torch.float64)
        own, indices = fn(x, router, bias, k, scale)
        if own.requires_grad:
            own.backward(grad)
        grads = {"gradient of x": x.grad, "gradient of router": router.grad}
        plain = {name: None if value is None else value.tolist() for name, value in grads.items()}
        found.append({"indices": indices.tolist(), "weights": own.detach().tolist()} | plain)
    return found


def plain_route(x: "Tensor", router: "Tensor", bias: "Tensor", k: int, scale: float) -> tuple["Tensor", "Tensor"]:
    """The same, one token and one expert after another."""
    import torch

    own, indices = [], []
    for token in x:
        scores = torch.stack([(token @ row).sigmoid() for row in router])
        best = sorted(range(len(scores)), key=lambda i: -float(scores[i].detach() + bias[i]))[:k]
        total = sum((scores[i] for i in best), start=scores.new_zeros(()))
        own.append(torch.stack([scale * scores[i] / total for i in best]))
        indices.append(best)
    return torch.stack(own), torch.tensor(indices)


def differs(ours: Any, theirs: Any) -> bool:
    """Whether two results are further apart than float64 explains."""
    import torch

    if ours is None:
        return True
    a, b = (torch.tensor(value, dtype=torch.float64) for value in (ours, theirs))
    return a.shape != b.shape or not torch.allclose(a, b, rtol=0, atol=TOLERANCE * max(1.0, float(b.abs().max())))


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
    from dualpipe_lab.world.context import rank_context

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
