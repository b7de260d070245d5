"""Exercises of "V3-MoE structure": the router, loads counted once.

Chapter: book/ep/v3-moe.  A router is judged by what each token gives to each expert, loads by what a backward came
through.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Numbers, Off, Unchanged, in_words
from dualpipe_course.declared import Repair
from dualpipe_course.ep import routed_runs as runs
from dualpipe_course.own.part import OnRanks, Part
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from torch import Tensor

WIDTH = 5  # of a token
NO_BIAS, BIAS, BELOW_ZERO = "no bias", "biases", "biases that make all values negative"


def _routed(rank: int, world_size: int, sizes: tuple[int, ...], biases: str) -> Found:
    """What each token gives to each expert, and the gradients of token and router."""
    import torch
    from mine.column import HOOKS
    from mine.router import choose

    x, router, bias, dy = _inputs(sizes, biases)
    given, now, seen = Unchanged(x=x, router=router, bias=bias), HOOKS["weight_grad"], []

    def hook(weight: "Tensor", *rest: "Tensor") -> "Tensor | None":
        seen.append(weight.data_ptr())
        return now(weight, *rest)

    HOOKS["weight_grad"] = hook
    _, num_experts, num_groups, num_kept, k = sizes
    chosen, weights = choose(x, router, bias, k, num_groups, num_kept)
    if refused := _refused(chosen, weights, (len(x), k), num_experts):
        return Found({}, refused=refused)
    given_to = torch.zeros_like(dy).scatter(1, chosen, weights)
    (given_to * dy).sum().backward()
    if router.data_ptr() not in seen:
        return Found({}, refused="the product of x and router is not that of `linear`: its gradient could not wait")
    given.check()
    values = {"chosen": torch.zeros_like(dy).scatter(1, chosen, 1), "weights": given_to, "dx": x.grad}
    values["gradient of the router"] = router.grad
    made = {words: _plain(sizes, biases, **how) for words, how in _SLIPS.items()}
    slips = {name: {words: Numbers.of(one[name]) for words, one in made.items()} for name in values}
    slips["chosen"] |= {_outside(chosen, _plain(sizes, biases)["kept"]): Numbers.of(values["chosen"])}
    return Found({name: Numbers.of(value) for name, value in values.items()}, slips=slips)


def _outside(chosen: "Tensor", kept: "Tensor | None") -> str:
    """Words for an expert of a group that is not kept; none if there is no such expert."""
    assert kept is not None
    for token, experts in enumerate(chosen.tolist()):
        for expert in experts:
            if not kept[token, expert]:
                return f"token {token} has expert {expert}, whose group is not kept; values can be below 0"
    return ""


def _refused(chosen: Any, weights: Any, shape: tuple[int, int], num_experts: int) -> str:
    import torch

    if not all(isinstance(one, torch.Tensor) and one.shape == shape for one in (chosen, weights)):
        return f"return chosen and weights, two tensors of shape {list(shape)}"
    if chosen.dtype != torch.int64 or weights.dtype != torch.float64:
        return f"chosen are whole numbers and weights as x is; they are {chosen.dtype} and {weights.dtype}"
    if chosen.numel() and not set(chosen.flatten().tolist()) <= set(range(num_experts)):
        return f"chosen are numbers from 0 to {num_experts - 1}; here are {chosen.tolist()}"
    if any(len(set(row)) < len(row) for row in chosen.tolist()):
        return f"a token has an expert twice: {next(row for row in chosen.tolist() if len(set(row)) < len(row))}"
    if not weights.requires_grad:
        return "weights come without a graph, and the router would never learn; only the choice has no gradient"
    return ""


def _inputs(sizes: tuple[int, ...], biases: str) -> "tuple[Tensor, ...]":
    import torch

    num_tokens, num_experts, *_ = sizes
    generator = torch.Generator().manual_seed(sum(sizes))
    x, router, bias, dy = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((num_tokens, WIDTH), (num_experts, WIDTH), (num_experts,), (num_tokens, num_experts))
    )
    bias = {NO_BIAS: 0 * bias, BIAS: bias / 3, BELOW_ZERO: bias / 3 - 4}[biases]
    return x.requires_grad_(), router.requires_grad_(), bias, dy


def _routing(rank: int, world_size: int, sizes: tuple[int, ...], biases: str) -> "dict[str, Tensor | None]":
    return {name: value for name, value in _plain(sizes, biases).items() if name != "kept"}


def _plain(
    sizes: tuple[int, ...],
    biases: str,
    by_bias: bool = True,
    best: int = 2,
    is_divided: bool = True,
    weight_bias: float = 0,
    through_sum: bool = True,
) -> "dict[str, Tensor | None]":
    """The same in plain torch, as it should be or with a mistake."""
    import torch

    x, router, bias, dy = _inputs(sizes, biases)
    num_tokens, num_experts, num_groups, num_kept, k = sizes
    size = num_experts // num_groups
    scores = torch.sigmoid(x @ router.mT)
    values = scores.detach() + by_bias * bias
    worth = values.view(num_tokens, num_groups, size).sort(-1).values[..., -best:].sum(-1)
    place = (-worth).argsort(-1).argsort(-1)  # 0: the best group
    is_open = (place < num_kept).repeat_interleave(size, -1)
    chosen = (-values.masked_fill(~is_open, -torch.inf)).argsort(-1).argsort(-1) < k
    own = (scores + weight_bias * bias) * chosen
    total = own.sum(-1, keepdim=True)
    weights = own / (total if through_sum else total.detach()) if is_divided else own
    (weights * dy).sum().backward()
    return {
        "chosen": chosen.double(),
        "weights": weights,
        "dx": x.grad,
        "gradient of the router": router.grad,
        "kept": is_open,
    }


_SLIPS: dict[str, dict[str, Any]] = {
    "the best scores were chosen; the bias takes part in the choice": {"by_bias": False},
    "the best of all, or a group by its best expert; a group is worth the sum of its two best": {"best": 1},
    "they are not divided by their sum over the token's experts": {"is_divided": False},
    "the bias is part of the weights; it only chooses": {"weight_bias": 1},
    "the gradient has not gone through the sum that the weights are divided by": {"through_sum": False},
}


def _why_not_routed(off: Off) -> str:
    if off.slip or off.name != "chosen" or off.has_other_shape or off.found is None:
        return in_words(off)
    size = off.expected.shape[1]
    token = off.place // size
    ours, right = (
        [expert for expert, is_one in enumerate(one.row(token)) if is_one] for one in (off.found, off.expected)
    )
    return f"token {token} has the experts {ours}, and the best {len(right)} of its groups are {right}"


def _judge_counted(router: Callable[..., Any], case: Any) -> None:
    found, expected, fault = on_ranks(runs.loads, 1, router, case, case=", ".join(case))[0]
    if fault:
        raise Wrong(f"{', '.join(case)}: {fault}")
    if found != expected:
        raise Wrong(
            f"{', '.join(case)}: load {found}, should be {expected}. A call counts once for each backward that "
            "comes through its weights, however often its forward runs"
        )


router = Part(
    "v3_moe-6",
    "router",
    "Experts from the best groups",
    "Write `choose(x, router, bias, k, num_groups, num_kept)`: the experts of each token, and their weights.",
    names=("choose",),
    trials=(
        OnRanks(
            _routed,
            (
                (1, (1, 4, 2, 1, 1), NO_BIAS),
                (1, (5, 6, 1, 1, 3), BIAS),
                (1, (0, 8, 4, 2, 2), BIAS),
                (1, (9, 8, 4, 2, 2), BIAS),
                (1, (7, 8, 4, 2, 3), BELOW_ZERO),
                (1, (8, 12, 3, 3, 4), BIAS),
                (1, (16, 16, 4, 2, 5), BIAS),
            ),
            _routing,
            "{1[0]} token(s), {1[4]} of {1[1]} experts from {1[3]} of {1[2]} group(s), {2}",
            why=_why_not_routed,
        ),
    ),
    right="7 cases of 0 to 16 tokens: choices, weights, and gradients through the weights alone",
    minutes=30,
    points=3,
    hints=(
        "Three steps: scores by linear and sigmoid; which groups, by scores plus bias, detached; the k best within "
        "them. Then forget the bias.",
        "unflatten(-1, (num_groups, -1)) makes groups; view(0, num_groups, -1) fails for no tokens. A closed group is "
        "filled with -inf: values can be negative.",
        "groups = (scores + bias).detach().unflatten(-1, (num_groups, -1)); kept = groups.topk(2, -1).values.sum(-1)"
        ".topk(num_kept, -1).indices; after masking the others, chosen = groups.flatten(-2).topk(k, -1).indices and "
        "weights = scores.gather(-1, chosen), divided by their sum.",
    ),
)

counted = Repair(
    "v3_moe-3",
    "Counted twice",
    "Repair `Router`, which counts tokens in its forward: recomputed ones twice, and those of evaluations.",
    cases=[(case,) for case in runs.PASSES],
    judge=_judge_counted,
    right=f"{len(runs.PASSES)} ways through a step: counted once for each backward, checkpointed or not",
    minutes=10,
    points=2,
    trail=True,
    hints=(
        "How often does a forward run under a checkpoint, and how often does a backward come through?",
        "torch.is_grad_enabled() is no answer: one kind of checkpoint runs both of its forwards with gradients.",
        "tensor.register_hook(fn) calls fn when a gradient arrives; a tensor that needs none has no hooks.",
    ),
)
