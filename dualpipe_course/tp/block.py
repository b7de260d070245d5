"""Exercises of "A Llama block": the part `block`, layers below that learn something else.

Chapter: book/tp/block.  Gradients are judged against one process in float64, bytes by the ledger.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off, in_words
from dualpipe_course.declared import Repair
from dualpipe_course.meter import Meter
from dualpipe_course.own.part import OnRanks, Part
from dualpipe_course.own.rules import ATTENTION
from dualpipe_course.switched_off import Without
from dualpipe_course.tp import layers
from dualpipe_course.tp.sequence_parallelism import hook, shard, unhooked

if TYPE_CHECKING:
    from torch import Tensor

_BELOW = {"dx": ". What the other ranks found out about these tokens belongs in it, once"}
_KEPT = "a rank keeps {found:,} bytes for the backward, {most:,} are enough: its own tokens of the input, not all"
FEATURES, EPS = 4, 1e-6
CUT = {"q": 0, "k": 0, "v": 0, "o": 1, "up": 0, "down": 1}
NORMS = ((1, 1, 2), (1, 3, 4), (1, 0, 2))  # ranks, tokens, features
HEADS = ((1, 2, 1, 2), (1, 3, 2, 1), (1, 4, 2, 3), (1, 0, 2, 2))  # ranks, tokens, heads, size of a head
# ranks of the group among so many; tokens, heads of all, size of a head, width of the MLP, are tokens cut?
QUIET: tuple[tuple[Any, ...], ...] = ((2, [0, 1], 2, 2, 2, 2, False), (4, [0, 1, 2, 3], 4, 4, 1, 4, True))
LAYERS: tuple[tuple[Any, ...], ...] = (
    (1, [0], 2, 1, 2, 3, False),
    (1, [0], 2, 1, 2, 3, True),
    (2, [0, 1], 3, 2, 2, 4, False),
    (2, [0, 1], 4, 2, 2, 4, True),
    (3, [2, 0], 4, 4, 3, 5, True),
    (4, [0, 1, 2, 3], 5, 4, 1, 3, False),
    (4, [3, 1, 0, 2], 8, 4, 1, 3, True),
    (2, [1, 0], 0, 2, 2, 4, False),
    (2, [1, 0], 0, 2, 2, 4, True),
)


def _numbers(values: "dict[str, Any]") -> dict[str, Numbers | None]:
    return {name: Numbers.of(value) for name, value in values.items()}


def _weights(num_heads: int, size: int, wide: int, quiet: bool = False) -> "dict[str, Tensor]":
    """Those of a whole layer, small enough that no softmax is all one token; quiet: o and down are zeros."""
    inner = num_heads * size
    shapes = {"norm1": (FEATURES,), "norm2": (FEATURES,), "o": (FEATURES, inner), "down": (FEATURES, wide)}
    shapes |= {"q": (inner, FEATURES), "k": (inner, FEATURES), "v": (inner, FEATURES), "up": (wide, FEATURES)}
    return {
        name: layers.draw(name, of) * (0 if quiet and name in ("o", "down") else 0.5) for name, of in shapes.items()
    }


def _plain_norm(x: "Tensor", scale: "Tensor") -> "Tensor":
    return scale * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def _plain_attend(q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
    import torch

    hidden = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def _plain_attention(x: "Tensor", w: "dict[str, Tensor]", num_heads: int) -> "Tensor":
    q, k, v = ((x @ w[name].t()).unflatten(-1, (num_heads, -1)).transpose(0, 1) for name in "qkv")
    return _plain_attend(q, k, v).transpose(0, 1).flatten(1) @ w["o"].t()


def _attend(tokens: int, num_heads: int, size: int) -> "Callable[[Tensor, Tensor, Tensor], Tensor]":
    """Attention that says which shape it needs."""
    shape = [num_heads, tokens, size]

    def attend(q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
        for name, x in (("q", q), ("k", k), ("v", v)):
            if list(x.shape) != shape:
                raise ValueError(f"attend takes (heads, tokens, size), here {shape}; {name} has {list(x.shape)}")
        return _plain_attend(q, k, v)

    return attend


def _norm(rank: int, world_size: int, tokens: int, features: int) -> Found:
    from mine.block import norm

    x, scale, dy = _of_norm(tokens, features)
    y = norm(x, scale)
    if getattr(y, "shape", None) == dy.shape:
        y.backward(dy)
    return Found(_numbers({"norm(x, scale)": y, "dx": x.grad, "dscale": scale.grad}))


def _of_norm(tokens: int, features: int) -> "tuple[Tensor, Tensor, Tensor]":
    x = layers.draw("x", (tokens, features))
    x[1:2] = 0  # a token that only eps keeps from a division by zero
    return x.requires_grad_(), layers.draw("scale", (features,)).requires_grad_(), layers.draw("dy", (tokens, features))


def _norm_alone(rank: int, world_size: int, tokens: int, features: int) -> "dict[str, Tensor]":
    x, scale, dy = _of_norm(tokens, features)
    y = _plain_norm(x, scale)
    y.backward(dy)
    return {"norm(x, scale)": y, "dx": x.grad, "dscale": scale.grad}


def _why_not_norm(off: Off) -> str:
    of_zeros = off.difference and off.found and off.place // max(off.found.shape[-1], 1) == 1
    return in_words(off) + (
        ". That is a token of zeros: is 1e-6 added to the mean, below the root?" if of_zeros else ""
    )


def _attention(rank: int, world_size: int, tokens: int, num_heads: int, size: int) -> Found:
    from mine.block import attention

    seen, w, (x, dy) = hook(), _leaves(_weights(num_heads, size, 1)), _tokens(tokens)
    y = attention(x, w, num_heads, _attend(tokens, num_heads, size))
    if getattr(y, "shape", None) == dy.shape:
        y.backward(dy)
    found = {"attention(x, ...)": y, "dx": x.grad} | {f"d{name}": w[name].grad for name in "qkvo"}
    return Found(_numbers(found), changed=unhooked({name: w[name] for name in "qkvo"}, seen))


def _attention_alone(rank: int, world_size: int, tokens: int, num_heads: int, size: int) -> "dict[str, Tensor]":
    w, (x, dy) = _leaves(_weights(num_heads, size, 1)), _tokens(tokens)
    y = _plain_attention(x, w, num_heads)
    y.backward(dy)
    return {"attention(x, ...)": y, "dx": x.grad} | {f"d{name}": w[name].grad for name in "qkvo"}


def _tokens(tokens: int) -> "tuple[Tensor, Tensor]":
    return layers.draw("x", (tokens, FEATURES)).requires_grad_(), layers.draw("dy", (tokens, FEATURES))


def _leaves(w: "dict[str, Tensor]") -> "dict[str, Tensor]":
    return {name: weight.clone().requires_grad_() for name, weight in w.items()}


def _layer(
    rank: int,
    world_size: int,
    ranks: list[int],
    tokens: int,
    num_heads: int,
    size: int,
    wide: int,
    cut: bool,
    quiet: bool = False,
) -> Found:
    from mine.block import layer

    if rank not in ranks:
        return Found({}, costs={"forward": 0, "backward": 0})
    num, me, seen = len(ranks), ranks.index(rank), hook()
    x, dy = (shard(of.detach(), 0, me, num) if cut else of.detach() for of in _tokens(tokens))
    x.requires_grad_()
    whole = _weights(num_heads, size, wide, quiet)
    w = _leaves({name: shard(of, CUT[name], me, num) if name in CUT else of for name, of in whole.items()})
    here, meter = num_heads // num, Meter()
    y = layer(x, w, here, _attend(tokens, here, size), ranks, cut)
    forward = meter.lap().bytes
    if getattr(y, "shape", None) == dy.shape:
        y.backward(dy)
    found = {"y": y, "dx": x.grad} | {f"d{name}": of.grad for name, of in w.items()}
    costs = {"forward": forward, "backward": meter.lap().bytes}
    return Found(_numbers(found), costs=costs, changed=unhooked({name: w[name] for name in CUT}, seen))


def _layer_alone(
    rank: int,
    world_size: int,
    ranks: list[int],
    tokens: int,
    num_heads: int,
    size: int,
    wide: int,
    cut: bool,
    quiet: bool = False,
) -> "dict[str, Tensor | None]":
    from torch.nn.functional import silu

    w, (x, dy) = _leaves(_weights(num_heads, size, wide, quiet)), _tokens(tokens)
    names = ["y", "dx", *(f"d{name}" for name in w)]
    if rank not in ranks:
        return dict.fromkeys(names)
    num, me = len(ranks), ranks.index(rank)
    of_tokens = {name: w[name].detach().expand(tokens, -1).clone().requires_grad_() for name in ("norm1", "norm2")}
    between = x + _plain_attention(_plain_norm(x, of_tokens["norm1"]), w, num_heads)
    y = between + silu(_plain_norm(between, of_tokens["norm2"]) @ w["up"].t()) @ w["down"].t()
    y.backward(dy)
    own = {"y": y.detach(), "dx": x.grad} | {f"d{name}": of.grad for name, of in of_tokens.items()}
    if cut:  # a norm's gradient is the partial sum of this rank's tokens
        own = {name: shard(value, 0, me, num) for name, value in own.items()}
    own |= {name: value.sum(0) for name, value in own.items() if name.startswith("dnorm")}
    own |= {f"d{name}": shard(w[name].grad, dim, me, num) for name, dim in CUT.items()}
    return {name: own[name] for name in names}


def _sums(
    world_size: int, ranks: list[int], tokens: int, num_heads: int, size: int, wide: int, cut: bool
) -> list[Limit]:
    num = len(ranks)
    most = 4 * (num - 1) * num * -(-tokens * FEATURES // num) * 8
    two = "two all-gathers and two reduce-scatters" if cut else "two all-reduces"
    words = (
        f"in the {{way}} the ranks sent {{{{found:,}}}} bytes in all; {two} send {{{{most:,}}}}: q, k and v share one"
    )
    return [Limit(way, most, words.format(way=way)) for way in ("forward", "backward")]


def _quietly(
    rank: int, world_size: int, ranks: list[int], tokens: int, num_heads: int, size: int, wide: int, cut: bool
) -> Found:
    return _layer(rank, world_size, ranks, tokens, num_heads, size, wide, cut, quiet=True)


def _quietly_alone(
    rank: int, world_size: int, ranks: list[int], tokens: int, num_heads: int, size: int, wide: int, cut: bool
) -> "dict[str, Tensor | None]":
    return _layer_alone(rank, world_size, ranks, tokens, num_heads, size, wide, cut, quiet=True)


def _why_not_quiet(off: Off) -> str:
    if off.name == "y" and off.ratio:
        return (
            f"o and down are zeros, so that y should be x, and it is {off.ratio:g} times x: add the residual behind "
            "the sum, inside of it every rank adds it"
        )
    return in_words(off)


_LAYER = {
    "dx": ". Each rank has used x for its own heads and features alone: what they say of x has to be summed over ranks",
    "dnorm": ". Where tokens are cut the norm stands before the gather; where not, all ranks' heads and features say "
    "something of what it returns, and CopyToRanks behind it sums that",
}


def _why_not_layer(off: Off) -> str:
    same = [value == off.found for value in off.by_rank]
    if off.name.startswith("dnorm") and off.difference and len(same) > 1 and all(same):
        return f"{off.name} is the same on all ranks, and should be this rank's partial sum, which `Buckets` adds up"
    known = _LAYER.get(off.name.rstrip("12"), "") if off.difference and len(same) > 1 else ""
    return in_words(off) + known


def _why_not_attention(off: Off) -> str:
    of_heads = off.difference and off.name == "attention(x, ...)"
    return in_words(off) + (". A head has neighbouring features: unflatten those, then swap the axes" * bool(of_heads))


def _pair(x: "Tensor", first: "Tensor", second: "Tensor") -> "Tensor":
    return (x @ first.t()).tanh() @ second.t()


def _judge_below(fn: Callable[..., Any]) -> str:
    sizes: tuple[tuple[int, tuple[int, ...], int], ...] = (
        (1, (2, 2), 3), (2, (2, 3), 4), (2, (2, 4, 3), 5), (4, (4, 2), 7), (4, (2, 8, 3), 8), (4, (2, 4, 16), 8),
    )  # fmt: skip
    for num_ranks, shape, wide in sizes:
        shapes = {"x": shape, "first": (wide, shape[-1]), "second": (shape[-1], wide)}
        cuts = {"x": -2, "first": 0, "second": 1}
        case = layers.Case(num_ranks, shapes, cuts, shape, -2, counts_kept=True)
        answer, size = Without(fn, *layers.LIBRARY), layers.num_bytes(shape)
        why = "A rank keeps its own tokens of the input, so the backward gathers them once more."
        tokens, own = size // shape[-1] // 8, -(-size // num_ranks)
        most = 2 * 8 * tokens * -(-wide // num_ranks) + 2 * own  # of what is wide, and of this rank's tokens, two each
        limits = [Limit("kept bytes", most, _KEPT, scope="largest")] if num_ranks > 2 else []
        back = size * 3 // 2
        layers.check_layer(answer, _pair, case, forward=size, backward=back, because=why, hints=_BELOW, limits=limits)
    return f"outputs and all gradients equal one process in {len(sizes)} cases, and only a rank's own tokens are kept"


block = Part(
    "block-4",
    "block",
    "A layer of a transformer",
    "Write norm, attention and layer, with cut tokens and with all tokens on every rank.",
    names=("norm", "attention", "layer"),
    trials=(
        OnRanks(_norm, NORMS, _norm_alone, "norm of {1} token(s) with {2} features", why=_why_not_norm),
        OnRanks(
            _attention,
            HEADS,
            _attention_alone,
            "attention of {1} token(s), {2} head(s) of size {3}",
            why=_why_not_attention,
        ),
        OnRanks(
            _quietly,
            QUIET,
            _quietly_alone,
            "group {1} of {0} ranks, o and down zero, tokens cut: {6}",
            why=_why_not_quiet,
        ),
        OnRanks(
            _layer,
            LAYERS,
            _layer_alone,
            "group {1} of {0} rank(s), {2} token(s), {3} head(s) of size {4}, MLP {5} wide, tokens cut: {6}",
            _sums,
            _why_not_layer,
        ),
    ),
    right=f"{len(NORMS) + len(HEADS) + len(QUIET) + len(LAYERS)} cases on 1 to 4 ranks, with cut tokens and without",
    off=ATTENTION,
    minutes=35,
    points=4,
    hints=(
        "Write norm and attention first: neither sends anything. `heads` is the number of heads here; their size "
        "follows from the rows of w['q'], not from the width of x.",
        "linear(x, w['q']).unflatten(-1, (heads, -1)).transpose(0, 1) is (heads, tokens, size); afterwards "
        "transpose(0, 1).flatten(1). In the layer, whatever enters a pair of products is the norm's result: gathered "
        "where tokens are cut, through CopyToRanks where not. The residual is added behind the sum.",
        "Cut: own = GatherTokens.apply(norm(x, w['norm1']), ranks); x = x + ScatterTokens.apply(attention(own, w, "
        "heads, attend), ranks); return x + mlp_between_cut_tokens(norm(x, w['norm2']), w['up'], w['down'], ranks). "
        "Not cut: CopyToRanks, SumFromRanks, column_linear and row_linear in their places.",
    ),
)

below = Repair(
    "block-3",
    "Loss right, layers below wrong",
    "Repair `pair(x, first, second)` between cut tokens, which gathers its input once more and keeps it nowhere.",
    judge=_judge_below,
    minutes=15,
    points=3,
    trail=True,
    hints=(
        "In the forward every rank gets all tokens. With which rows of the first weight does it use them?",
        "So each rank finds a partial sum of the gradient of all tokens, and a slice of one partial sum is no sum. A "
        "row of dW is a sum over all tokens: whose tokens does the backward have?",
        "grad belongs to all tokens. dW needs the input of all tokens, and the backward may gather it; dx is a sum "
        "over the ranks, of which each wants its own tokens.",
    ),
)
