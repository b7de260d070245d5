"""Exercises of "V3-MoE structure": sizes, experts from groups, weights with a bias in them, one move per step, a mask.

Chapter: book/ep/v3-moe.  Choices are judged by trying all sets of groups, weights and gradients against autograd, the
bias after a step on ranks with and without microbatches.
"""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

from dualpipe_course import check as checks
from dualpipe_course.ep import routed_runs as runs
from dualpipe_course.exercise import Wrong, exercise, hint_of
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import call_each, check_ints, ended, needs_function, on_ranks

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("parameters of an expert", "experts that compute", "bytes of a row", "first expert", "percent")
EXPECTED = (6_291_456, 8, 2112, 3, 40)
_SLIPS: tuple[dict[int, str], ...] = (
    {2_097_152: "that is one matrix; gate, up and down are three", 4_194_304: "gate, up and down are three matrices"},
    {6: "every token uses the shared ones too", 66: "that is how many there are", 7: "there are two shared ones"},
    {2048: "the scales travel too", 2064: "a scale has 4 bytes", 4096: "fp8 has one byte per number"},
    {
        0: "that is the order without the bias: 0.6 + 0.35 is more than 0.9",
        4: "a group is worth the sum of its two best: (4, 5) has 0.9 and is left out",
    },
    {
        51: "that is 0.95 / 1.85; the bias is for the selection alone",
        60: "that is the weight of the other one",
        63: "that is 0.95 / 1.5; the bias is for the selection alone",
        22: "divide by the scores of the chosen experts, not of all",
    },
)
_GENERAL = (
    "three matrices of 2048 by 1024",
    "6 routed and the shared ones",
    "2048 bytes, and 2048 / 128 scales of 4",
    "keep the two best groups by the sum of their biased scores, then the best biased score",
    "its score over the sum of both chosen scores, all without the bias",
)
STEPS = (
    runs.Step((2, 2)), runs.Step((3,)), runs.Step((1, 3, 0)), runs.Step((0, 2, 1, 1)),
    runs.Step((1, 2), ((0, 3), (1, 2), (4, 5), (0, 1), (2, 3), (4, 5), (0, 3))),  # 3 2 2 3 2 2
    runs.Step((2, 1), ((0, 3), (1, 2), (4, 5), (0, 1), (2, 3), (4, 0), (1, 2), (3, 5))),  # 3 3 3 3 2 2
    runs.Step((0, 0)),
)  # fmt: skip
SCALES = (1, 1e12, 1e300)  # no number of the answer's own is below all values
SIZES = ((8, 2, 4, 2), (8, 4, 4, 2), (6, 2, 6, 3), (12, 3, 3, 1), (4, 4, 2, 2), (16, 6, 4, 2))  # E, k, groups, kept


def hint(exercise: int | None = None) -> None:
    """Print the next hint for an exercise, or for the first unsolved one."""
    hint_of(checks.topic("v3_moe"), exercise)


@exercise(
    "v3_moe-1",
    "A smaller sister",
    "predict",
    minutes=10,
    points=1,
    hints=(
        "A row of 2048 numbers has 16 scales.",
        "With the bias, the groups are worth 1.0, 1.45 and 0.9. Which two stay, and what is the largest value in them?",
        "The bias helps to choose. The weight is a score divided by the sum of the two chosen scores.",
    ),
)
def numbers(answer: object) -> str:
    """Predict sizes of a layer, and what a token with a bias among its experts does."""
    check_ints(answer, NAMES, EXPECTED, _SLIPS, _GENERAL)
    return "6,291,456 parameters, 8 experts per token, 2,112 bytes per row; expert 3 comes first and weighs 40%"


@exercise(
    "v3_moe-2",
    "Groups first",
    "implement",
    minutes=10,
    points=3,
    hints=(
        "unflatten(1, (num_groups, -1)) makes [tokens, groups, experts of a group]; topk(2).values has the two best.",
        "What is smaller than any value, whatever its sign?",
        "A group may have a single expert: topk(min(2, size)).",
    ),
)
def selection(fn: Callable[..., Any]) -> str:
    """Write `choose(values, k, num_groups, num_kept)`: experts from the best groups."""
    import torch

    needs_function(fn)
    cases = [(s * values, *sizes[1:]) for sizes in SIZES for values in _values(sizes[0]) for s in (1, 1e12)]
    answers = call_each(
        Without(fn, "dualpipe_lab.ep.deepseek_moe:group_limited_topk"), [(case[0].clone(), *case[1:]) for case in cases]
    )
    for (values, k, num_groups, num_kept), (is_fine, found) in zip(cases, answers, strict=True):
        sizes = f"{values.shape[1]} experts, k = {k}, {num_kept} of {num_groups} groups"
        if not is_fine:
            raise Wrong(ended(sizes, found))
        if not isinstance(found, torch.Tensor) or found.shape != (len(values), k) or found.dtype != torch.int64:
            raise Wrong(f"{sizes}: return indices of shape [{len(values)}, {k}], whole numbers, as topk gives them")
        for row, chosen in zip(values.tolist(), found.tolist(), strict=True):
            _judge_choice(sizes, row, chosen, k, num_groups, num_kept)
    return f"{len(cases)} cases: the experts that trying all sets of groups finds, with negative values too"


@exercise(
    "v3_moe-3",
    "A thumb on the scale",
    "find the bug",
    minutes=5,
    points=2,
    hints=(
        "Set one bias to 5, so that its expert is always chosen. What is its weight then?",
        "Two things are made of the scores: a choice and weights. Which of them is the bias for?",
        "Keep the name scores for the sigmoids; choose by scores.detach() + bias.",
    ),
)
def weights(fn: Callable[..., Any]) -> str:
    """Repair `route(x, router, bias, k, scale)`, whose weights contain the bias."""
    needs_function(fn)
    cases = [(seed, num_tokens, k, scale) for seed, (num_tokens, k, scale) in enumerate(_ROUTES)]
    found = on_ranks(runs.routed, 1, fn, cases, case="route")[0]
    expected = on_ranks(runs.routed, 1, runs.plain_route, cases, case="the reference")[0]
    for (_, num_tokens, k, scale), ours, theirs in zip(cases, found, expected, strict=True):
        for name in ("indices", "weights", "gradient of x", "gradient of router"):
            if runs.differs(ours[name], theirs[name]):
                why = _REASONS[name].format(k=k, scale=scale)
                raise Wrong(
                    f"{num_tokens} tokens, k = {k}, scale {scale:g}: {name} differ from one token at a time. {why}"
                )
    return f"{len(cases)} cases: choices with the bias; weights and both gradients without it"


@exercise(
    "v3_moe-4",
    "One step, one move",
    "find the bug",
    minutes=10,
    points=3,
    hints=(
        "How often is the bias moved on a rank with three microbatches, and how often on one with none?",
        "Add the loads of all microbatches up first. Then all ranks need the same sum.",
        "A rank without microbatches has a load of zeros, and takes part in the message.",
    ),
)
def one_move(router: Callable[..., Any], fn: Callable[..., Any]) -> str:
    """Repair `train_step(router, microbatches, speed)`, which moves a bias per microbatch and rank."""
    import torch

    needs_function(fn)
    for step in STEPS:
        where = str(step)
        results = on_ranks(runs.moved, len(step.counts), router, fn, step, case=where)
        start, expected, right = runs.plain_move(router, step)
        biases = [torch.tensor(bias, dtype=torch.float64) for bias, _ in results]
        if any(not torch.equal(bias, biases[0]) for bias in biases):
            raise Wrong(f"{where}: afterwards the ranks have different biases; each moved by what it saw itself")
        if bad := (biases[0] != expected).nonzero().flatten().tolist():
            by = (biases[0] - start)[bad[0]] / runs.SPEED
            raise Wrong(
                f"{where}: expert {bad[0]} had {int(right[bad[0]])} tokens of {int(right.sum())} in the step, mean "
                f"{float(right.double().mean()):.4g}; its bias moved by {float(by):.4g} times the speed"
            )
        calls = max(sent for _, sent in results)
        if calls > 1:
            raise Wrong(f"{where}: {calls} collectives on a rank; one sum of all loads is enough")
    return f"{len(STEPS)} steps on 1 to 4 ranks: one move by the load of all, the same on every rank, one message"


@exercise(
    "v3_moe-5",
    "A mask that can be beaten",
    "find the bug",
    minutes=5,
    points=1,
    hints=(
        "Which value has a masked expert, and which expert of a kept group has a smaller one?",
        "A score is above 0, but a score plus a bias need not be. Any number can be beaten by a smaller bias.",
        "masked_fill(~kept[..., None], -torch.inf): nothing is below it.",
    ),
)
def mask(fn: Callable[..., Any]) -> str:
    """Repair `mask(values, kept)`, which lets experts of other groups in where values are negative."""
    needs_function(fn)
    cases = [(scale * values, sizes) for sizes in SIZES for values in _values(sizes[0]) for scale in SCALES]
    answers = call_each(fn, [(values.clone(), _kept(values, *sizes[2:])) for values, sizes in cases])
    for (values, (num_experts, k, num_groups, num_kept)), (is_fine, found) in zip(cases, answers, strict=True):
        sizes = f"{num_experts} experts, k = {k}, {num_kept} of {num_groups} groups"
        if not is_fine:
            raise Wrong(ended(sizes, found))
        if getattr(found, "shape", None) != values.shape:
            raise Wrong(f"{sizes}: return values of shape {list(values.shape)}, one for each token and expert")
        for row, chosen in zip(values.tolist(), found.topk(k).indices.tolist(), strict=True):
            _judge_choice(sizes, row, chosen, k, num_groups, num_kept)
    return f"{len(cases)} cases: every expert is of a kept group, whatever the sign and size of the values"


def _kept(values: "Tensor", num_groups: int, num_kept: int) -> "Tensor":
    import torch

    grouped = values.unflatten(1, (num_groups, -1))
    worth = grouped.topk(min(2, grouped.shape[2])).values.sum(2)
    return torch.zeros_like(worth, dtype=torch.bool).scatter_(1, worth.topk(num_kept).indices, True)


_ROUTES = ((1, 2, 1.0), (9, 2, 2.5), (9, 3, 2.5), (5, 6, 1.5))  # tokens, k, scale
_REASONS = {
    "indices": "The choice goes by score plus bias, best first",
    "weights": "They add up to {scale:g} for each token, and a bias has no part in them",
    "gradient of x": "The weights are differentiable in the scores, through their sum too",
    "gradient of router": "The weights are differentiable in the scores, through their sum too",
}


def _values(num_experts: int) -> list["Tensor"]:
    import torch

    generator = torch.Generator().manual_seed(num_experts)
    drawn = torch.rand(8, num_experts, generator=generator, dtype=torch.float64)
    found = [drawn, drawn - 0.5, drawn.log()]
    for values in found:  # the least value of all in a group that is kept, the first and the last one
        values[6, :2] = values.new_tensor([99.0, -9.0])
        values[7, -2:] = values.new_tensor([99.0, -9.0])
    return found


def _judge_choice(
    sizes: str, row: Sequence[float], chosen: Sequence[int], k: int, num_groups: int, num_kept: int
) -> None:
    size = len(row) // num_groups
    worth = [sum(sorted(row[group * size :][:size])[-2:]) for group in range(num_groups)]
    kept = max(combinations(range(num_groups), num_kept), key=lambda some: sum(worth[group] for group in some))
    allowed = [group * size + i for group in kept for i in range(size)]
    best = sorted(allowed, key=lambda i: -row[i])[:k]
    if list(chosen) == best:
        return
    values = ", ".join(f"{value:.3g}" for value in row)
    where = f"{sizes}: values {values}"
    if outside := [i for i in chosen if i not in allowed]:
        group = outside[0] // size
        raise Wrong(f"{where}: expert {outside[0]} is of group {group}, worth {worth[group]:.3g}, which is not kept")
    if sorted(chosen) == sorted(best):
        raise Wrong(f"{where}: the right experts, but not the best first: {list(chosen)}")
    raise Wrong(f"{where}: chose {list(chosen)}, groups {list(kept)} are kept, and {best} are the best in them")
