"""Exercises of "Top-k gradient": who hears anything, sigmoid weights backward, a loss of all tokens, a single expert.

Chapter: book/ep/topk-gradient.  Gradients are judged against the formulas in plain Python, made where no answer runs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.differences import apart, close
from dualpipe_course.ep import gates
from dualpipe_course.meter import Meter
from dualpipe_course.switched_off import AUTOGRAD, Without
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

NAMES = ("logits, as they are", "logits, normalised", "logits, one expert", "bytes for dW", "bytes for the loss")
_SLIPS: tuple[dict[int, str], ...] = (
    {
        12: "the softmax's denominator contains the logits of all experts, also of those that were not asked",
        36: "the chosen experts have a gradient too",
    },
    {
        48: "after dividing, the denominator of the softmax has cancelled: which logits are left in the weights?",
        6: "each token has two chosen experts",
    },
    {6: "p / p is 1 whatever p is", 48: "p / p is 1 whatever p is"},
    {
        512: "those are the bytes of dW; an all-reduce sends 2 (N - 1) / N of them",
        384: "that is the reduce-scatter; the gather of the sums follows",
        1536: "float32 has 4 bytes",
        0: "the tokens of every rank belong to the same router",
    },
    {
        96: "E counts are not enough: the number of tokens is summed too",
        72: "those are the bytes of E + 1 integers; an all-reduce sends 2 (N - 1) / N of them",
        216: "the backward sends nothing: f is a constant",
        0: "the load of all tokens is known to no rank before the sum",
    },
)
# tokens, experts, k, scale, shift of all logits
BACKWARD_CASES = (
    (1, 3, 2, 1.0, 0.0),
    (1, 2, 1, 1.0, 0.0),
    (4, 6, 3, 2.5, 0.0),
    (3, 4, 4, 1.0, 0.0),
    (0, 4, 2, 1.0, 0.0),
    (3, 5, 2, 2.5, 30.0),
    (3, 5, 2, 1.0, -800.0),
    (3, 5, 3, 1.0, 800.0),
)
BALANCE_CASES = (((4,), 2, 1), ((5, 2), 3, 2), ((3, 3), 4, 1), ((4, 0, 2), 5, 2))  # tokens by rank, experts, k
SWITCH_CASES = ((2, 3, 1), (5, 4, 1), (3, 4, 2), (4, 5, 3), (3, 6, 4), (4, 5, 5), (1, 1, 1))  # tokens, experts, k
LIBRARY = ("dualpipe_lab.ep.router", "dualpipe_lab.ep.router_losses")


class Found(NamedTuple):
    """What a router returned, and what reached its logits."""

    indices: list[list[int]]
    weights: list[list[float]]
    gradient: list[list[float]]


def _gradients(rank: int, world_size: int, fn: Callable[..., Any], cases: list[Any]) -> list[list[list[float]]]:
    import torch

    results = []
    for routed, grad, scale in cases:
        shape = len(routed.logits), routed.num_experts
        logits = torch.tensor(routed.logits, dtype=torch.float64).view(shape)
        indices = torch.tensor(routed.indices, dtype=torch.int64).view(shape[0], routed.k)
        with torch.no_grad():
            found = fn(logits, indices, torch.tensor(grad, dtype=torch.float64).view(shape[0], routed.k), scale)
        assert tuple(found.shape) == shape, f"the gradient has shape {list(found.shape)}, the logits {list(shape)}"
        results.append(found.tolist())
    return results


def _routes(rank: int, world_size: int, fn: Callable[..., Any], cases: list[Any]) -> list[Found]:
    import torch

    results = []
    for values, grad, k in cases:
        logits = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        indices, weights = fn(logits, k)
        if weights.requires_grad:
            weights.backward(torch.tensor(grad, dtype=torch.float64))
        gradient = torch.zeros_like(logits) if logits.grad is None else logits.grad
        results.append(Found(indices.tolist(), weights.tolist(), gradient.tolist()))
    return results


def _check_shares(fn: Callable[..., Any], sizes: tuple[int, ...], experts: int, k: int) -> None:
    routed = gates.chosen(gates.draw(sum(sizes), experts), experts, k)
    results = on_ranks(_share, len(sizes), fn, routed, sizes, case=str(sizes))
    where = f"ranks with {', '.join(map(str, sizes))} tokens, {experts} experts, k = {k}"
    loss, gradient = gates.balance_loss(routed)
    total = sum(share for share, *_ in results)
    if not close([total], [loss]):
        each = [gates.balance_loss(routed.part(sizes, rank))[0] for rank in range(len(sizes)) if sizes[rank]]
        why = "every rank returns the whole" if abs(total - len(sizes) * loss) < 1e-9 else "count the tokens of all"
        if abs(total - sum(each)) < 1e-9 or abs(total * len(sizes) - sum(each)) < 1e-9:
            why = "each rank has taken the load of its own tokens alone"
        both = apart(total, loss)
        raise Wrong(
            f"{where}: the shares add up to {both.found}, the loss of all tokens is {both.expected}{both.why}: {why}"
        )
    for rank, (_, found, forward, back) in enumerate(results):
        start = sum(sizes[:rank])
        gates.check_rows(f"{where}, rank {rank}", "gradient", found, gradient[start : start + sizes[rank]], None)
        limit = 2 * (len(sizes) - 1) * 8 * (experts + 1)
        if forward > limit or back:
            raise Wrong(
                f"{where}: rank {rank} sent {forward} bytes forward and {back} backward; one all-reduce of "
                f"{experts + 1} integers will do, and f is a constant"
            )


def _share(
    rank: int, world_size: int, fn: Callable[..., Any], routed: gates.RoutedTokens, sizes: tuple[int, ...]
) -> tuple[float, list[list[float]], int, int]:
    import torch

    part = routed.part(sizes, rank)
    logits = torch.tensor(part.logits, dtype=torch.float64).view(-1, routed.num_experts).requires_grad_()
    meter = Meter()
    share = fn(logits, torch.tensor(part.indices, dtype=torch.int64).view(-1, routed.k))
    forward = meter.lap()
    if share.requires_grad:
        share.backward()
    gradient = torch.zeros_like(logits) if logits.grad is None else logits.grad
    return float(share.detach()), gradient.tolist(), forward.bytes, meter.lap().bytes


def _judge_backward(fn: Callable[..., Any]) -> str:
    cases = []
    for tokens, experts, k, scale, shift in BACKWARD_CASES:
        routed = gates.chosen(gates.draw(tokens, experts, shift), experts, k)
        cases.append((routed, gates.draw(tokens, k, seed=7), scale))
    results = on_ranks(_gradients, 1, Without(fn, *LIBRARY, *AUTOGRAD), cases, case="your function")[0]
    for sizes, (routed, grad, scale), found in zip(BACKWARD_CASES, cases, results, strict=True):
        expected = gates.sigmoid_gradient(routed, grad, scale)
        near = f", logits near {sizes[4]:g}" if sizes[4] else ""
        where = f"{sizes[0]} token(s), {sizes[1]} experts, k = {sizes[2]}, scale {scale:g}{near}"
        gates.check_rows(where, "gradient", found, expected, routed)
    return f"right in {len(cases)} cases, with logits of -800 and 800, and without a token"


def _judge_balance(fn: Callable[..., Any], sizes: Any, experts: Any, k: Any) -> None:
    _check_shares(Without(fn, "dualpipe_lab.ep.router_losses"), sizes, experts, k)


def _judge_switch(fn: Callable[..., Any]) -> str:
    cases = [(gates.draw(tokens, experts), gates.draw(tokens, k, seed=7), k) for tokens, experts, k in SWITCH_CASES]
    results = on_ranks(_routes, 1, fn, cases, case="your function")[0]
    for (logits, grad, k), found in zip(cases, results, strict=True):
        routed = gates.chosen(logits, len(logits[0]), k)
        where = f"{len(logits)} token(s), {len(logits[0])} experts, k = {k}"
        if found.indices != routed.indices:
            raise Wrong(f"{where}: the experts are {found.indices}, expected {routed.indices}; only weights were wrong")
        weights, gradient = gates.softmax_gradient(routed, grad, normalised=k > 1)
        if k == 1 and len(logits[0]) > 1 and not any(map(any, found.gradient)):
            raise Wrong(
                f"{where}: the weights are {found.weights}, and no logit has a gradient: nothing can be learned"
            )
        gates.check_rows(where, "weight", found.weights, weights, routed)
        gates.check_rows(where, "gradient", found.gradient, gradient, routed)
    return f"weights and gradients are right in {len(cases)} cases; with k = 1 the router learns"


numbers = Predict(
    "topk_gradient-1",
    "Who hears anything",
    NAMES,
    lambda h, n: (48, 12, 0, 64 * h * (n - 1) / n, 144 * (n - 1) / n),
    "hidden size {h} runs on {n} ranks",
    minutes=5,
    points=1,
    hints=(
        "Write a weight as a function of logits. Which of them appear in it?",
        "With one expert the weight is p / p.",
        "dW is 8 by 16. The balance loss sums the load of 8 experts and a number of tokens.",
    ),
    slips=_SLIPS,
    h=(16, 8, 24, 32, 40, 48, 64, 96),
    n=(4, 2, 3, 8),
    called={"h": "hidden size", "n": "ranks"},
)

backward = Implement(
    "topk_gradient-2",
    "DeepSeek's weights, backward",
    "Write the gradient of normalised sigmoid weights by hand.",
    judge=_judge_backward,
    minutes=20,
    points=3,
    hints=(
        "Normalised scores are the softmax of the scores' logarithms. Write v for them; the weights are scale * v.",
        "dv = scale * grad, and the logarithm of a score gets v * (dv - sum of v dv). Then comes its slope, 1 - p.",
        "torch.nn.functional.logsigmoid does not underflow, and 1 - sigmoid(u) is sigmoid(-u).",
    ),
)

balance = Implement(
    "topk_gradient-3",
    "A loss of all tokens",
    "Write a rank's share of the balance loss of all tokens.",
    cases=BALANCE_CASES,
    judge=_judge_balance,
    right=f"shares add up and gradients are those of one process in {len(BALANCE_CASES)} cases, one without tokens",
    minutes=20,
    points=3,
    hints=(
        "f needs the choices of all ranks, and the mean of p the number of all tokens. Both are integers: sum them.",
        "P is a sum over all tokens, divided by their number. Which part of that sum is this rank's?",
        "E * (f * sum of own p).sum() / all tokens. f has no gradient, so nothing is sent on the way back.",
    ),
)

switch = Repair(
    "topk_gradient-4",
    "One flag for all k",
    "Repair a router that learns nothing with a single expert.",
    judge=_judge_switch,
    minutes=5,
    points=2,
    hints=(
        "Print the weights for k = 1.",
        "What does Switch multiply the answer of its one expert with?",
        "The scores as they are for k = 1, the normalised ones otherwise.",
    ),
)
