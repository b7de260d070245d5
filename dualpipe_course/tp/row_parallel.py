"""Exercises of "Row-parallel": the layer itself, alone and behind a column, a bias that every rank adds.

Chapter: book/tp/row-parallel.  Outputs and gradients are judged against one process, bytes by the ledger.
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

# ranks, shape of x, width of the middle: on 4 ranks 6 features are cut into 2 2 2 0
SIZES = (
    (1, (3, 2), 2), (2, (1, 2), 2), (2, (3, 2), 4), (2, (2, 3, 4), 5),
    (3, (5, 3), 3), (4, (3, 4), 6), (4, (2, 3, 4), 8),
)  # fmt: skip

_BIASED = {
    "dbias": ". The output is right, but the bias must learn on every rank as it does on one",
    "y": ". Subtract the right output: what is left is a multiple of the bias",
}


_SENT = "in the {way} the ranks sent {{found:,}} bytes in all, {{most:,}} are enough. {why}"


def _rows(rank: int, world_size: int, groups: list[list[int]], tokens: int, ins: int, outs: int) -> Found:
    """The operator alone, then the layer, then the layer with a hook."""
    from mine.column import HOOKS
    from mine.row import SumFromRanks, row_linear

    ranks = next(group for group in groups if rank in group)
    me, num = ranks.index(rank), len(ranks)
    x, weight, dy = _drawn(ranks, tokens, ins, outs)
    x, weight = (layers.own_part(whole, 1, me, num).requires_grad_() for whole in (x, weight))
    part = layers.draw(f"part{rank}", (outs, tokens)).t().requires_grad_()  # column by column in memory
    unchanged, meter = Unchanged(x=x, weight=weight, dy=dy, **{"the x of SumFromRanks": part}), Meter()
    total = SumFromRanks.apply(part, ranks)
    found = {"the sum of SumFromRanks": Numbers.of(total)}
    total.backward(dy)
    found["the gradient behind SumFromRanks"] = Numbers.of(part.grad)
    meter.lap()
    y = row_linear(x, weight, ranks)
    forward, found["y"] = meter.lap().bytes, Numbers.of(y)
    y.backward(dy)
    backward = meter.lap().bytes
    found |= {name: Numbers.of(grad) for name, grad in (("x.grad", x.grad), ("weight.grad", weight.grad))}
    own = {"it is this rank's partial sum; the ranks' partial sums add up": Numbers.of(x @ weight.t())}
    if changed := unchanged.first():
        return Found({}, refused=f"{changed} has changed: others may hold it still, so sum a copy")
    refused, _ = layers.backward_with_hook(HOOKS, lambda: row_linear(x, weight, ranks), weight, dy)
    words = f"{refused}. The product is to be column's linear, which knows the hook" if refused else ""
    costs = {"bytes forward": forward, "bytes backward": backward}
    return Found(found, slips={"y": own} if num > 1 else {}, costs=costs, changed=words)


def _drawn(ranks: list[int], tokens: int, ins: int, outs: int) -> "tuple[Tensor, Tensor, Tensor]":
    shapes = {"x": (tokens, ins), "weight": (outs, ins), "dy": (tokens, outs)}
    x, weight, dy = (layers.draw(f"{name}{ranks}", shape) for name, shape in shapes.items())
    return x, weight, dy


def _whole_layer(
    rank: int, num_ranks: int, groups: list[list[int]], tokens: int, ins: int, outs: int
) -> "dict[str, Tensor]":
    ranks = next(group for group in groups if rank in group)
    me, num = ranks.index(rank), len(ranks)
    x, weight, dy = _drawn(ranks, tokens, ins, outs)
    parts = [layers.draw(f"part{one}", (outs, tokens)).t() for one in ranks]
    return {
        "the sum of SumFromRanks": sum(parts[1:], parts[0]),
        "the gradient behind SumFromRanks": dy,
        "y": x @ weight.t(),
        "x.grad": layers.own_part(dy @ weight, 1, me, num),
        "weight.grad": layers.own_part(dy.t() @ x, 1, me, num),
    }


def _row_limits(num_ranks: int, groups: list[list[int]], tokens: int, ins: int, outs: int) -> list[Limit]:
    enough = layers.all_reduce_bytes(groups, tokens * outs)
    return [
        Limit("bytes forward", enough, _SENT.format(way="forward", why="Only y is summed, once.")),
        Limit("bytes backward", 0, _SENT.format(way="backward", why="Every rank has dy, the gradient of the sum.")),
    ]


def _pair(rank: int, world_size: int, tokens: int, ends: int, middle: int) -> "dict[str, Tensor | None]":
    """A column, a function of single features, and a row."""
    import torch
    from mine.column import column_linear
    from mine.row import row_linear

    ranks = list(range(world_size))
    x, up, down, dy = _pair_drawn(tokens, ends, middle)
    up, down = layers.own_part(up, 0, rank, world_size), layers.own_part(down, 1, rank, world_size)
    for leaf in (x, up, down):
        leaf.requires_grad_()
    y = row_linear(torch.tanh(column_linear(x, up, ranks)), down, ranks)
    y.backward(dy)
    return {"y of the pair": y, "x.grad of the pair": x.grad, "up.grad": up.grad, "down.grad": down.grad}


def _whole_pair(rank: int, num_ranks: int, tokens: int, ends: int, middle: int) -> "dict[str, Tensor]":
    import torch

    x, up, down, dy = (one.requires_grad_() for one in _pair_drawn(tokens, ends, middle))
    y = torch.tanh(x @ up.t()) @ down.t()
    y.backward(dy.detach())
    grads = {"up.grad": layers.own_part(up.grad, 0, rank, num_ranks)}
    grads["down.grad"] = layers.own_part(down.grad, 1, rank, num_ranks)
    return {"y of the pair": y.detach(), "x.grad of the pair": x.grad} | grads


def _pair_drawn(tokens: int, ends: int, middle: int) -> "tuple[Tensor, ...]":
    shapes = {"x": (tokens, ends), "up": (middle, ends), "down": (ends, middle), "dy": (tokens, ends)}
    return tuple(layers.draw(name, shape) / 4 for name, shape in shapes.items())


def _why_no_row(off: Off) -> str:
    back = off.name in ("x.grad", "weight.grad", "the gradient behind SumFromRanks") and off.ratio
    return in_words(off) + (
        ". All ranks compute the same loss from the sum: its gradient passes as it is" if back else ""
    )


def _judge(fn: Callable[..., Any], num_ranks: int, shape: tuple[int, ...], inputs: int) -> None:
    """The case has `inputs` features, cut over the ranks, and as many outputs as the shape has columns."""
    x_shape, out_shape = (*shape[:-1], inputs), shape
    shapes = {"x": x_shape, "weight": (shape[-1], inputs), "bias": shape[-1:]}
    case = layers.Case(num_ranks, shapes, {"x": -1, "weight": 1, "bias": None}, out_shape)
    why = "Only y is summed, once, and no gradient."
    size = layers.num_bytes(out_shape)
    layers.check_layer(fn, _linear, case, forward=size, because=why, hints=_BIASED)


def _linear(x: "Tensor", weight: "Tensor", bias: "Tensor") -> "Tensor":
    from torch.nn.functional import linear

    return linear(x, weight, bias)


row = Part(
    "row_parallel-4",
    "row",
    "A linear layer by rows",
    "Write the operator SumFromRanks, and row_linear over the linear of your column.",
    names=("SumFromRanks", "row_linear"),
    trials=(
        OnRanks(
            _rows,
            (
                (1, [[0]], 2, 3, 2),
                (2, [[0, 1]], 1, 2, 2),
                (2, [[1, 0]], 3, 5, 2),
                (3, [[0, 1, 2]], 4, 3, 3),
                (4, [[0, 2], [3, 1]], 2, 4, 3),
                (4, [[0, 1, 2, 3]], 3, 6, 5),
                (2, [[0, 1]], 0, 4, 3),
            ),
            _whole_layer,
            "group(s) {1} of {0} rank(s), {2} token(s), {3} inputs, {4} outputs",
            _row_limits,
            _why_no_row,
        ),
        OnRanks(
            _pair, ((2, 3, 2, 4), (4, 3, 4, 6)), _whole_pair, "a column and a row on {0} ranks, {1} tokens, {3} between"
        ),
    ),
    right="7 layers on groups of 1 to 4 ranks, one without features, one without tokens, and 2 pairs: one sum each",
    off=AUTOGRAD,
    minutes=15,
    points=3,
    hints=(
        "linear(x, weight) is this rank's partial sum of all outputs. SumFromRanks is CopyToRanks with its two "
        "directions exchanged.",
        "Sum a copy: the partial sum is an argument. The gradient of a sum is that of each of its terms, and all ranks "
        "have it.",
        "forward: total = x.clone(); all_reduce(total, ranks); return total. backward: return dy, None. row_linear: "
        "SumFromRanks.apply(linear(x, weight), ranks).",
    ),
)

biased = Repair(
    "row_parallel-3",
    "A bias on every rank",
    "Repair a row-parallel layer whose output contains the bias once per rank.",
    cases=SIZES,
    judge=_judge,
    right=f"outputs and gradients equal one process in {len(SIZES)} cases, with a single sum",
    minutes=6,
    points=2,
    trail=True,
    hints=(
        "Set x to zero. What is the output on one rank, and what on four?",
        "Dividing the bias repairs the output. What happens to its gradient then?",
        "reduce_from_ranks(functional.linear(x, weight)) is the sum. The bias belongs behind it, once.",
    ),
)
