"""Exercises of "Column-parallel": the layer itself, a layer below that drifts apart.

Chapter: book/tp/column-parallel.  Outputs and gradients are judged against one process, bytes by the ledger.
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

# ranks, shape of x, outputs: on 4 ranks 6 outputs are cut into 2 2 2 0
SIZES = (
    (1, (3, 2), 2), (2, (1, 2), 2), (2, (3, 2), 4), (2, (2, 3, 4), 5),
    (3, (5, 3), 3), (4, (3, 4), 6), (4, (2, 3, 4), 8),
)  # fmt: skip
_TOO_EARLY = {
    "dscale": ". dx is right, so f stands too early: scale is used before it",
    "dweight": ". Every rank has other rows: their gradients belong to this rank alone",
}
_BEHIND = (
    "f stands behind the product, where every rank has other outputs, and sums their dy; "
    "it belongs before the product, on what all ranks hold alike"
)


_SENT = "in the {way} the ranks sent {{found:,}} bytes in all, {{most:,}} are enough. {why}"
_ONE_SUM = "Only dx is summed, once: 2 (N - 1) N-ths of it from every rank."


def _one_layer(rank: int, world_size: int, tokens: int, ins: int, outs: int) -> Found:
    """`linear` twice, so that its gradients add up, and with a hook that puts one off."""
    from mine.column import HOOKS, linear

    x, weight, dy = (layers.draw(name, shape) for name, shape in _shapes("", tokens, ins, outs).items())
    x.requires_grad_()
    weight.requires_grad_()
    unchanged = Unchanged(x=x, weight=weight, dy=dy)
    found = {}
    for number in (1, 2):
        y = linear(x, weight)
        if number == 1:
            found["y"] = y
        y.backward(dy)
    grads = {"x.grad after two backwards": x.grad, "weight.grad after two backwards": weight.grad}
    found |= {name: None if grad is None else grad.clone() for name, grad in grads.items()}
    refused, later = layers.backward_with_hook(HOOKS, lambda: linear(x.detach(), weight), weight, dy)
    found["the product that the hook was given"] = later
    changed = unchanged.first()
    return Found(
        {name: Numbers.of(value) for name, value in found.items()},
        refused=refused,
        changed=f"{changed} has changed; leave what comes in as it is" if changed else "",
    )


def _one_layer_alone(rank: int, num_ranks: int, tokens: int, ins: int, outs: int) -> "dict[str, Tensor]":
    x, weight, dy = (layers.draw(name, shape) for name, shape in _shapes("", tokens, ins, outs).items())
    dw = dy.t() @ x
    twice = {"x.grad after two backwards": 2 * dy @ weight, "weight.grad after two backwards": 2 * dw}
    return {"y": x @ weight.t()} | twice | {"the product that the hook was given": dw}


def _shapes(group: str, tokens: int, ins: int, outs: int) -> dict[str, tuple[int, int]]:
    return {f"x{group}": (tokens, ins), f"weight{group}": (outs, ins), f"dy{group}": (tokens, outs)}


def _columns(rank: int, world_size: int, groups: list[list[int]], tokens: int, ins: int, outs: int) -> Found:
    """The operator alone, then the layer, then the layer with a hook."""
    from mine.column import HOOKS, CopyToRanks, column_linear

    ranks = next(group for group in groups if rank in group)
    me, num = ranks.index(rank), len(ranks)
    x, whole, all_dy = (layers.draw(n, shape) for n, shape in _shapes(str(ranks), tokens, ins, outs).items())
    weight, dy = layers.own_part(whole, 0, me, num), layers.own_part(all_dy, 1, me, num)
    dx = layers.draw(f"dx{rank}", (ins, tokens)).t()  # other numbers on every rank, column by column in memory
    x.requires_grad_()
    weight.requires_grad_()
    unchanged, meter = Unchanged(x=x, weight=weight, dy=dy, **{"the gradient that CopyToRanks got": dx}), Meter()
    copy = CopyToRanks.apply(x, ranks)
    found = {"what CopyToRanks returns": Numbers.of(copy)}
    copy.backward(dx)
    found["the gradient behind CopyToRanks"] = None if x.grad is None else Numbers.of(x.grad)
    x.grad = None
    meter.lap()
    y = column_linear(x, weight, ranks)
    forward, found["y"] = meter.lap().bytes, Numbers.of(y)
    if found["y"] is not None and found["y"].shape == tuple(dy.shape):
        y.backward(dy)
    backward = meter.lap().bytes
    found |= {name: Numbers.of(grad) for name, grad in (("x.grad", x.grad), ("weight.grad", weight.grad))}
    slips = {"x.grad": _partial(weight, dy, all_dy, me, num)} if num > 1 else {}
    costs = {"bytes forward": forward, "bytes backward": backward}
    if changed := unchanged.first():
        return Found({}, refused=f"{changed} has changed: others may hold it still, so send a copy")
    refused, _ = layers.backward_with_hook(HOOKS, lambda: column_linear(x, weight, ranks), weight, dy)
    return Found(found, slips=slips, costs=costs, changed=refused)


def _partial(weight: "Tensor", dy: "Tensor", all_dy: "Tensor", me: int, num: int) -> "dict[str, Numbers | None]":
    """What dx is without f, and with f behind the product."""
    own = {"it is what this rank's own outputs say; the ranks' partial sums add up": Numbers.of(dy @ weight)}
    dys = [layers.own_part(all_dy, 1, place, num) for place in range(num)]
    if len({one.shape for one in dys}) > 1:
        return own
    return own | {_BEHIND: Numbers.of(sum(dys[1:], dys[0]) @ weight)}


def _whole_layer(
    rank: int, num_ranks: int, groups: list[list[int]], tokens: int, ins: int, outs: int
) -> "dict[str, Tensor]":
    ranks = next(group for group in groups if rank in group)
    me, num = ranks.index(rank), len(ranks)
    x, weight, dy = (layers.draw(n, shape) for n, shape in _shapes(str(ranks), tokens, ins, outs).items())
    dxs = [layers.draw(f"dx{one}", (ins, tokens)).t() for one in ranks]
    return {
        "what CopyToRanks returns": x,
        "the gradient behind CopyToRanks": sum(dxs[1:], dxs[0]),
        "y": layers.own_part(x @ weight.t(), 1, me, num),
        "x.grad": dy @ weight,
        "weight.grad": layers.own_part(dy.t() @ x, 0, me, num),
    }


def _column_limits(num_ranks: int, groups: list[list[int]], tokens: int, ins: int, outs: int) -> list[Limit]:
    enough = layers.all_reduce_bytes(groups, tokens * ins)
    return [
        Limit("bytes forward", 0, _SENT.format(way="forward", why="Every rank has x, and computes other outputs.")),
        Limit("bytes backward", enough, _SENT.format(way="backward", why=_ONE_SUM)),
    ]


def _why_no_column(off: Off) -> str:
    if off.found is None:
        return f"{off.name} is missing"
    own_alone = off.name == "weight.grad" and not off.has_other_shape
    return in_words(off) + (". Every rank has other outputs: this gradient belongs to it alone" if own_alone else "")


def _scaled(x: "Tensor", scale: "Tensor", weight: "Tensor") -> "Tensor":
    return (x * scale) @ weight.t()


def _judge_scaled(fn: Callable[..., Any], num_ranks: Any, shape: Any, outputs: Any) -> None:
    shapes = {"x": shape, "scale": shape[-1:], "weight": (outputs, shape[-1])}
    case = layers.Case(num_ranks, shapes, {"x": None, "scale": None, "weight": 0}, (*shape[:-1], outputs), out_cut=-1)
    why = "One sum is enough: behind it, dx and dscale are the same on all ranks."
    size = layers.num_bytes(shape)
    layers.check_layer(fn, _scaled, case, backward=size, because=why, hints=_TOO_EARLY, behind=_BEHIND)


column = Part(
    "column_parallel-4",
    "column",
    "A linear layer by hand, and by columns",
    "Write linear with its backward by hand, the operator CopyToRanks, and column_linear.",
    names=("HOOKS", "linear", "CopyToRanks", "column_linear"),
    trials=(
        OnRanks(
            _one_layer,
            ((1, 1, 2, 2), (1, 3, 2, 4), (1, 0, 3, 2), (1, 2, 3, 0)),
            _one_layer_alone,
            "linear of {1} token(s), {2} inputs, {3} outputs",
        ),
        OnRanks(
            _columns,
            (
                (1, [[0]], 2, 3, 2),
                (2, [[0, 1]], 1, 2, 2),
                (2, [[1, 0]], 3, 2, 5),
                (3, [[0, 1, 2]], 4, 3, 3),
                (4, [[0, 2], [3, 1]], 2, 3, 4),
                (4, [[0, 1, 2, 3]], 3, 4, 6),
                (2, [[0, 1]], 0, 3, 4),
            ),
            _whole_layer,
            "column_linear, group(s) {1} of {0} rank(s), {2} token(s), {3} inputs, {4} outputs",
            _column_limits,
            _why_no_column,
        ),
    ),
    right="4 layers alone and 7 on groups of 1 to 4 ranks, with the hook, without outputs and without tokens; one sum",
    off=AUTOGRAD,
    minutes=45,
    points=4,
    hints=(
        "linear is Function.apply(x, weight). Its backward has dy (T, out) and returns dx = dy W (T, in) and "
        "dW = dy^T x (out, in), the latter by whatever function stands in HOOKS at that moment.",
        "CopyToRanks returns x.view_as(x), and in its backward a copy of dy that your all_reduce has summed. It stands "
        "before the product: there all ranks hold the same, and behind it each has other outputs.",
        'HOOKS = {"weight_grad": now} with now(weight, x, dy) = dy.t() @ x; backward: x, weight = ctx.saved_tensors; '
        'return dy @ weight, HOOKS["weight_grad"](weight, x, dy). column_linear: linear(CopyToRanks.apply(x, ranks), '
        "weight).",
    ),
)

scaled = Repair(
    "column_parallel-3",
    "Two ranks, two scales",
    "Repair a layer whose replicated scale gets another gradient on every rank.",
    cases=SIZES,
    judge=_judge_scaled,
    right=f"all gradients equal one process in {len(SIZES)} cases, with a single sum",
    minutes=10,
    points=2,
    trail=True,
    hints=(
        "The outputs are right. Compare dx and dscale on two ranks: what does the sum over the ranks give?",
        "copy_to_ranks belongs where a tensor that all ranks hold alike is first used by each in its own way.",
        "x and scale are multiplied by all ranks alike. The product with this rank's rows is what differs.",
    ),
)
