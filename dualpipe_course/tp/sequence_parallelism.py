"""Exercises of "Sequence parallelism": the part `tokens`, a partial bias.

Chapter: book/tp/sequence-parallelism.  Outputs and gradients are judged against one process, bytes by the ledger.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off, Unchanged, in_words
from dualpipe_course.declared import Repair
from dualpipe_course.meter import Meter
from dualpipe_course.own.part import OnRanks, Part
from dualpipe_course.own.rules import AUTOGRAD
from dualpipe_course.tp import layers

if TYPE_CHECKING:
    from torch import Tensor

_BIAS = {
    "dbias": ". A rank adds the bias to its own tokens, and so it finds the partial sum of these tokens",
    "y": ". The bias belongs to every token once",
}
# ranks of the group among so many ranks; all tokens, features, width of the middle
ALONE: tuple[tuple[Any, ...], ...] = (
    (1, [0], 3, 2), (2, [0, 1], 2, 1), (3, [2, 0], 4, 3), (4, [0, 1, 2, 3], 8, 3), (2, [0, 1], 0, 3),
)  # fmt: skip
BETWEEN: tuple[tuple[Any, ...], ...] = (
    (1, [0], 2, 2, 3), (2, [0, 1], 4, 3, 4), (3, [2, 0], 6, 2, 5), (4, [0, 1, 2, 3], 8, 4, 3), (2, [1, 0], 0, 2, 4),
)  # fmt: skip
_GATHERED = (
    "that is what this rank's own loss says of its tokens; all ranks have used them, and the gradients of all add up"
)
_SCATTERED = "that is a partial sum, this rank's alone; sum those of all ranks, and keep this rank's tokens"
_AROUND = "that has zeros for the tokens of other ranks, which know their own gradients: gather them"
_HOOKED = (
    "the gradient of {} does not come through HOOKS of mine.column: make every product with `linear`, so that Zero "
    "Bubble can put their weights' gradients off"
)


def shard(x: "Tensor", dim: int, member: int, num: int) -> "Tensor":
    """A member's block, of as many as fit; the last ones may have fewer, or none."""
    size = -(-x.shape[dim] // num)
    start = min(member * size, x.shape[dim])
    return x.narrow(dim, start, min(size, x.shape[dim] - start)).clone()


def unhooked(weights: "dict[str, Tensor]", seen: "list[Tensor]") -> str:
    """Say which weight's gradient has not come through `HOOKS`; an empty string if all have."""
    missing = [name for name, weight in weights.items() if not any(weight is one for one in seen)]
    return _HOOKED.format(missing[0]) if missing else ""


def hook() -> "list[Tensor]":
    """Note the weights whose gradients come through `HOOKS`, which are found as before."""
    from mine.column import HOOKS

    seen, before = [], HOOKS["weight_grad"]

    def noted(weight: Any, *rest: Any) -> Any:
        seen.append(weight)
        return before(weight, *rest)

    HOOKS["weight_grad"] = noted
    return seen


def _two_functions(rank: int, world_size: int, ranks: list[int], tokens: int, features: int) -> Found:
    """Each alone, with another gradient on every rank."""
    import torch
    from mine.tokens import GatherTokens, ScatterTokens

    if rank not in ranks:
        return Found({})
    num, me = len(ranks), ranks.index(rank)
    own, whole = (tokens // num, features), (tokens, features)
    x, partial = (layers.draw(f"{name}{me}", shape).requires_grad_() for name, shape in (("x", own), ("p", whole)))
    d_whole, d_own = layers.draw(f"w{me}", whole[::-1]).t(), layers.draw(f"o{me}", own)  # the first lies in columns
    unchanged = Unchanged(x=x, partial=partial, dy=d_whole)
    gathered, scattered = GatherTokens.apply(x, ranks), ScatterTokens.apply(partial, ranks)
    values = {"what GatherTokens returns": gathered, "what ScatterTokens returns": scattered}
    if [getattr(value, "shape", None) for value in values.values()] == [whole, own]:
        gathered.backward(d_whole)
        scattered.backward(d_own)
    values |= {"dx of GatherTokens": x.grad, "dx of ScatterTokens": partial.grad}
    around = torch.zeros(whole, dtype=torch.float64)
    around[me * own[0] : (me + 1) * own[0]] = d_own
    slips = {
        "what ScatterTokens returns": {_SCATTERED: partial.detach().chunk(num)[me]},
        "dx of GatherTokens": {_GATHERED: d_whole.chunk(num)[me]},
        "dx of ScatterTokens": {_AROUND: around},
    }
    return Found(
        {name: Numbers.of(value) for name, value in values.items()},
        slips={name: {words: Numbers.of(value) for words, value in of.items()} for name, of in slips.items()},
        changed=f"{unchanged.first()} has changed; sum in a copy of it" if unchanged.first() else "",
    )


def _two_functions_alone(
    rank: int, world_size: int, ranks: list[int], tokens: int, features: int
) -> "dict[str, Tensor | None]":
    import torch

    names = ("what GatherTokens returns", "what ScatterTokens returns", "dx of GatherTokens", "dx of ScatterTokens")
    if rank not in ranks:
        return dict.fromkeys(names)
    num, me = len(ranks), ranks.index(rank)
    own, whole = (tokens // num, features), (tokens, features)
    of = range(num)
    sums = [
        sum(parts)
        for parts in ((layers.draw(f"p{r}", whole) for r in of), (layers.draw(f"w{r}", whole[::-1]).t() for r in of))
    ]
    gathered, d_scattered = (torch.cat([layers.draw(f"{name}{r}", own) for r in of]) for name in "xo")
    values = (gathered, sums[0].chunk(num)[me], sums[1].chunk(num)[me], d_scattered)
    return dict(zip(names, values, strict=True))


def _between(rank: int, world_size: int, ranks: list[int], tokens: int, features: int, wide: int) -> Found:
    from mine.tokens import mlp_between_cut_tokens

    if rank not in ranks:
        return Found({}, costs={"forward": 0, "backward": 0})
    num, me, seen = len(ranks), ranks.index(rank), hook()
    x, dy = (shard(layers.draw(name, (tokens, features)), 0, me, num) for name in ("x", "dy"))
    up = shard(layers.draw("up", (wide, features)), 0, me, num)
    down = shard(layers.draw("down", (features, wide)), 1, me, num)
    leaves = {"x": x, "up": up, "down": down}
    for leaf in leaves.values():
        leaf.requires_grad_()
    meter = Meter()
    y = mlp_between_cut_tokens(x, up, down, ranks)
    forward = meter.lap().bytes
    if y.shape == dy.shape:
        y.backward(dy)
    found = {"y": y} | {f"d{name}": leaf.grad for name, leaf in leaves.items()}
    return Found(
        {name: Numbers.of(value) for name, value in found.items()},
        costs={"forward": forward, "backward": meter.lap().bytes},
        changed=unhooked({"up": up, "down": down}, seen),
    )


def _between_alone(
    rank: int, world_size: int, ranks: list[int], tokens: int, features: int, wide: int
) -> "dict[str, Tensor | None]":
    from torch.nn.functional import silu

    if rank not in ranks:
        return dict.fromkeys(("y", "dx", "dup", "ddown"))
    shapes = {"x": (tokens, features), "up": (wide, features), "down": (features, wide)}
    x, up, down = [layers.draw(name, shape).requires_grad_() for name, shape in shapes.items()]
    y = silu(x @ up.t()) @ down.t()
    y.backward(layers.draw("dy", (tokens, features)))
    num, me = len(ranks), ranks.index(rank)
    values = (y.detach(), 0), (x.grad, 0), (up.grad, 0), (down.grad, 1)
    return {name: shard(of, dim, me, num) for name, (of, dim) in zip(("y", "dx", "dup", "ddown"), values, strict=True)}


def _halves(world_size: int, ranks: list[int], tokens: int, features: int, wide: int) -> list[Limit]:
    most = 2 * (len(ranks) - 1) * tokens * features * 8
    words = (
        "in the {way} the ranks sent {{found:,}} bytes in all; an all-gather and a reduce-scatter send {{most:,}}. "
        "Keep what was gathered, and let a sum leave each rank its own tokens alone"
    )
    return [Limit(way, most, words.format(way=way)) for way in ("forward", "backward")]


def _pair(x: "Tensor", first: "Tensor", second: "Tensor") -> "Tensor":
    return (x @ first.t()).tanh() @ second.t()


def _biased(x: "Tensor", first: "Tensor", second: "Tensor", bias: "Tensor") -> "Tensor":
    return _pair(x, first, second) + bias


def _judge_bias(fn: Callable[..., Any]) -> str:
    sizes: tuple[tuple[int, tuple[int, ...], int], ...] = ((1, (2, 2), 3), (2, (2, 3), 4), (4, (4, 2), 8))
    for num_ranks, shape, wide in (*sizes, (4, (2, 8, 3), 6)):  # the last rank has no features
        features = shape[-1]
        shapes = {"x": shape, "first": (wide, features), "second": (features, wide), "bias": (features,)}
        case = layers.Case(num_ranks, shapes, {"x": -2, "first": 0, "second": 1, "bias": None}, shape, -2)
        size = layers.num_bytes(shape)
        back = size + layers.num_bytes((features,))
        why = "Beside the tokens, the gradient of the bias alone is summed."
        layers.check_layer(fn, _biased, case, forward=size, backward=back, because=why, hints=_BIAS)
    return f"output and all gradients equal one process in {len(sizes) + 1} cases"


_TOKENS = {
    "y": ". A product with a part of `down` is a partial sum: sum those of all ranks, and keep this rank's tokens",
    "dx": ". Every rank has used all tokens with its part of `up`: dx is a sum over ranks",
    "dup": ". A row of `up` has seen all tokens, and so its gradient is a sum over all of them",
    "ddown": ". A column of `down` has seen all tokens: each rank needs the gradient of all of them",
}


def _why_not_between(off: Off) -> str:
    return in_words(off) + (_TOKENS[off.name] if off.difference and len(off.by_rank) > 1 else "")


tokens = Part(
    "sequence_parallelism-4",
    "tokens",
    "Tokens cut between the layers",
    "Write GatherTokens, ScatterTokens and mlp_between_cut_tokens over your ring and your linear layer.",
    names=("GatherTokens", "ScatterTokens", "mlp_between_cut_tokens"),
    trials=(
        OnRanks(
            _two_functions,
            ALONE,
            _two_functions_alone,
            "group {1} of {0} rank(s), {2} token(s) of {3} feature(s)",
            tolerance=0,
        ),
        OnRanks(
            _between,
            BETWEEN,
            _between_alone,
            "an MLP, group {1} of {0} rank(s), {2} token(s) of {3} features, {4} wide",
            _halves,
            _why_not_between,
        ),
    ),
    right=f"{len(ALONE) + len(BETWEEN)} cases on 1 to 4 ranks, two halves of an all-reduce each way",
    off=AUTOGRAD,
    minutes=30,
    points=3,
    hints=(
        "Forward and backward of each class are one line: your all_gather, and your reduce_scatter. Which is which?",
        "All ranks use the gathered tokens, so their gradient is the sum over ranks, of which each wants its own "
        "tokens: a reduce-scatter. A rank's tokens of a sum have one gradient, and every rank needs it for the part "
        "that it added: an all-gather.",
        "hidden = silu(linear(GatherTokens.apply(x, ranks), up)); return ScatterTokens.apply(linear(hidden, down), "
        "ranks). Each backward returns the gradient of x and None for `ranks`.",
    ),
)

bias = Repair(
    "sequence_parallelism-3",
    "A bias behind the reduce-scatter",
    "Repair a pair between cut tokens whose bias has a partial gradient.",
    judge=_judge_bias,
    minutes=10,
    points=2,
    trail=True,
    hints=(
        "Which tokens does a rank add the bias to?",
        "The page has a weight with the same problem. Which operator sums its gradient?",
        "copy_to_ranks is the identity in the forward and an all-reduce in the backward.",
    ),
)
