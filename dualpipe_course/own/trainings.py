"""What the four runs train: what each rank does with the parts, and the training of one process beside it.

In: the package `mine`, imported by the ranks alone.  Out: losses, raw gradients of the first step, weights.
An exported trainer has this file, too (`export.py`): it knows torch, `mine` and the plain model.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from dualpipe_ours.plain_model import Name, Trained

    Named = dict[Name, Tensor]

TOLERANCE = 1e-10
STEPS, TOKENS = 3, 6


class Found(NamedTuple):
    """What a rank has after a run.

    Attributes:
        losses: by step; nothing where the rank computes none.
        first: raw gradients of the first step, summed over the ranks that hold summands.
        weights: after the last step.
        parts: whose functions were called.
    """

    losses: list[float]
    first: "Named"
    weights: "Named"
    parts: frozenset[str]


class Case(NamedTuple):
    """One training: what a rank does, on how many ranks, and which piece of a whole weight a rank has.

    Attributes:
        words: the case, in words.
        run: `run(rank, *args)` in a process that knows the parts: losses, first gradients, weights.
        args: for it.
        num_ranks: how many ranks there are.
        reference: the training of one process.
        piece: `piece(whole, name, rank)`.
    """

    words: str
    run: "Callable[..., tuple[list[float], Named, Named]]"
    args: tuple[Any, ...]
    num_ranks: int
    reference: "Callable[[], Trained]"
    piece: "Callable[[Tensor, Name, int], Tensor]"


def difference(case: Case, rank: int, ours: Found, wanted: Found) -> tuple[float, str]:
    """The largest difference of a rank from one process, and its first one beyond 1e-10 in words."""
    import torch

    losses = [torch.tensor(each, dtype=torch.float64) for each in (ours.losses, wanted.losses[: len(ours.losses)])]
    pairs = [("the loss", losses[0], losses[1])]
    for kind, own, whole in (("first gradient", ours.first, wanted.first), ("weight", ours.weights, wanted.weights)):
        for name, value in own.items():
            expected = case.piece(whole[name], name, rank)
            layer, weight, expert = name
            words = f"{kind} of {weight}{'' if expert is None else f' {expert}'}, layer {layer}"
            if value.shape != expected.shape:
                return torch.inf, f"{words} has shape {list(value.shape)}, expected {list(expected.shape)}"
            pairs.append((words, value, expected))
    worst = 0.0
    for words, value, expected in pairs:
        off = float((value - expected).detach().abs().max()) if value.numel() else 0.0
        if not off <= TOLERANCE:
            return off, f"{words} is off by {off:.0e} from one process"
        worst = max(worst, off)
    return worst, ""


def _dense_cases(_: int) -> list[Case]:
    modes = {"cut": "tokens cut", "whole": "tokens whole", "zero3": "the head as a unit of ZeRO-3"}
    return [
        Case(words, _dense, (mode,), 4, _dense_reference, partial(_dense_piece, mode)) for mode, words in modes.items()
    ]


def _dense_reference() -> "Trained":
    from dualpipe_ours.plain_model import make_batch, make_layers, train

    return train(make_layers(2, with_experts=False), [make_batch(2, TOKENS, step) for step in range(STEPS)])


def _dense_piece(mode: str, whole: "Tensor", name: "Name", rank: int) -> "Tensor":
    import torch

    from dualpipe_ours.plain_model import CUT

    replica, member = divmod(rank, 2)
    if mode == "zero3" and name[1] == "head":
        flat = torch.cat([whole.flatten(), whole.new_zeros(whole.numel() % 2)])
        return flat.view(2, -1)[replica]
    return whole.chunk(2, CUT[name[1]])[member] if name[1] in CUT else whole


def _dense(rank: int, mode: str) -> "tuple[list[float], Named, Named]":
    """Tensor 2 x data 2; the last sequence has no targets."""
    from mine.block import layer, norm
    from mine.buckets import Buckets
    from mine.column import linear
    from mine.data import num_tokens, share_of_loss
    from mine.ring import all_reduce
    from mine.zero1 import ShardedAdam
    from mine.zero3 import Unit, shard_of

    from dualpipe_ours.plain_model import BETAS, CUT, EPS, HEADS, LR, attend, leaves, make_batch, make_layers

    (replica, member), cut = divmod(rank, 2), mode == "cut"
    tensor, data = [2 * replica, 2 * replica + 1], [member, 2 + member]
    counted = list(range(4)) if cut else data
    layers = [
        {name: (v.chunk(2, CUT[name])[member] if name in CUT else v).clone().requires_grad_() for name, v in w.items()}
        for w in make_layers(2, with_experts=False)
    ]
    head, shape = layers[-1]["head"], tuple(layers[-1]["head"].shape)
    if mode == "zero3":
        head = layers[-1]["head"] = shard_of(head, data)
    named = leaves(layers)
    copied = {name: leaf for name, leaf in named.items() if mode != "zero3" or leaf is not head}
    adams = [ShardedAdam(copied.values(), data, LR, BETAS, EPS)]
    adams += [ShardedAdam([head], [rank], LR, BETAS, EPS)] * (mode == "zero3")  # the unit has summed it
    buckets = Buckets([leaf for (_, name, _), leaf in named.items() if name not in CUT], tensor, 200) if cut else None

    def logits_of(ids: "Tensor") -> "Tensor":
        x = layers[0]["embed"][ids]
        for w in layers:
            x = layer(x, w, HEADS // 2, attend, tensor, cut)
        x = norm(x, layers[-1]["norm3"])
        return Unit.apply(x, head, lambda x, w: x @ w.t(), shape, data) if mode == "zero3" else linear(x, head)

    losses: list[float] = []
    first: Named = {}
    for step in range(STEPS):
        for leaf in named.values():
            leaf.grad = None
        ids, targets = (x[replica] for x in make_batch(2, TOKENS, step))
        if cut:
            ids, targets = (x.chunk(2)[member] for x in (ids, targets))
        loss = share_of_loss(logits_of(ids), targets, num_tokens(targets, counted))
        loss.backward()
        if buckets:
            buckets.finish()
        total = loss.detach().clone()
        all_reduce(total, counted)
        losses.append(float(total))
        first = first or _summed(named, copied, data)
        for adam in adams:
            adam.step()
    return losses, first, {name: leaf.detach() for name, leaf in named.items()}


def _summed(named: "Named", copied: "Named", data: list[int]) -> "Named":
    """Gradients, of weights that every rank of `data` has their sum: of copies, a step gets its own as they are."""
    from mine.data import sum_gradients

    copies = {name: leaf.detach().clone() for name, leaf in copied.items()}
    for name, copy in copies.items():
        grad = copied[name].grad
        copy.grad = None if grad is None else grad.clone()
    sum_gradients(copies.values(), data)
    found = {name: copies.get(name, leaf).grad for name, leaf in named.items()}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def _pipeline_cases(_: int) -> list[Case]:
    num_ranks, num_microbatches = 3, 4
    return [
        Case(order, _pipeline, (order, num_ranks, num_microbatches), num_ranks, _pipeline_reference, _whole)
        for order in ("GPipe", "1F1B", "ZB-H1")
    ]


def _whole(whole: "Tensor", name: "Name", rank: int) -> "Tensor":
    return whole


def _pipeline_reference() -> "Trained":
    from dualpipe_ours.plain_model import make_batch, make_layers, train

    return train(make_layers(3, with_experts=False), [make_batch(4, TOKENS)])


def _pipeline(rank: int, order: str, num_ranks: int, num_microbatches: int) -> "tuple[list[float], Named, Named]":
    """One step of a row, with the live activations that the order allows and the bytes that they are."""
    import torch
    from mine.block import layer, norm
    from mine.column import linear
    from mine.data import num_tokens, share_of_loss
    from mine.execute import execute
    from mine.later import SplitStage
    from mine.memory import rank_bytes
    from mine.ring import all_reduce
    from mine.row_messages import with_messages
    from mine.rows_1f1b import one_f_one_b_rows
    from mine.rows_gpipe import gpipe_place, gpipe_rows
    from mine.rows_zb_h1 import zb_h1_rows

    from dualpipe_ours.plain_model import HEADS, attend, make_batch, make_layers

    w = make_layers(num_ranks, with_experts=False)[rank]
    for leaf in w.values():
        leaf.requires_grad_()
    ids, targets = make_batch(num_microbatches, TOKENS)
    live = most = 0

    class Counted(SplitStage):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            nonlocal live, most
            live, most = live + 1, max(most, live + 1)
            return super().forward(x)

        def backward(self, saved: Any, dy: Any) -> Any:
            nonlocal live
            live -= 1
            return super().backward(saved, dy)

    def f(x: "Tensor") -> "Tensor":
        y = layer(w["embed"][x] if "embed" in w else x, w, HEADS, attend, [rank], False)
        return linear(norm(y, w["norm3"]), w["head"]) if "head" in w else y

    total = num_tokens(targets, [rank])
    rows = {"GPipe": gpipe_rows, "1F1B": one_f_one_b_rows, "ZB-H1": zb_h1_rows}[order](num_ranks, num_microbatches)
    row = with_messages(rows[rank], rank, gpipe_place, num_ranks)
    stages = {rank: Counted(f, w.values())}
    losses = execute(row, stages, gpipe_place, num_ranks, ids, lambda y, i: share_of_loss(y, targets[i], total))
    allowed = num_microbatches if order == "GPipe" else min(num_ranks - rank, num_microbatches)
    numel = sum(leaf.numel() for leaf in w.values())
    if rank_bytes(numel, 1, 8, 1000, most) != 32 * numel + 1000 * allowed:
        raise RuntimeError(f"{most} live activations, {order} has {allowed} on rank {rank}: rank_bytes, or the row?")
    mean = torch.stack([torch.zeros((), dtype=torch.float64), *losses.values()]).sum()
    all_reduce(mean, list(range(num_ranks)))
    return [float(mean)], {(rank, name, None): leaf.grad for name, leaf in w.items() if leaf.grad is not None}, {}


def _expert_cases(_: int) -> list[Case]:
    return [
        Case(f"{n} rank(s)", _mixture, (n,), n, partial(_mixture_reference, n), partial(_mixture_piece, n))
        for n in (1, 2, 4)
    ]


def _mixture_inputs(num_ranks: int) -> "Tensor":
    import torch

    from dualpipe_ours.plain_model import WIDTH

    return torch.randn(3 * num_ranks, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def _mixture_reference(num_ranks: int) -> "Trained":
    from dualpipe_ours.plain_model import Trained, attention, experts, leaves, make_layers

    (w,), x = make_layers(1), _mixture_inputs(num_ranks).requires_grad_()
    named = leaves([w])
    for leaf in named.values():
        leaf.requires_grad_()
    y = attention(x, w) + experts(x, w)
    (y * y.detach().cos()).sum().backward()
    grads = {name: leaf.grad for name, leaf in named.items() if leaf.grad is not None}
    return Trained([], grads | {(0, "x", None): x.grad}, {(0, "y", None): y.detach()})


def _mixture_piece(num_ranks: int, whole: "Tensor", name: "Name", rank: int) -> "Tensor":
    return whole.chunk(num_ranks)[rank] if name[1] in ("x", "y") else whole


def _mixture(rank: int, num_ranks: int) -> "tuple[list[float], Named, Named]":
    """Ring attention and experts on this rank's tokens, with autograd."""
    import torch
    from mine.block import attention
    from mine.moe import moe
    from mine.ring import all_reduce
    from mine.ring_attention import RingAttention
    from mine.router import choose

    from dualpipe_ours.plain_model import EXPERTS, HEADS, ROUTE, leaves, make_layers

    (w,), ranks, here = make_layers(1), list(range(num_ranks)), EXPERTS // num_ranks
    w |= {name: w[name][rank * here : (rank + 1) * here] for name in ("gates", "ups", "downs")}
    named = leaves([w])
    for leaf in named.values():
        leaf.requires_grad_()
    x = _mixture_inputs(num_ranks).chunk(num_ranks)[rank].requires_grad_()
    y = attention(x, w, HEADS, lambda q, k, v: RingAttention.apply(q, k, v, ranks))
    chosen, weights = choose(x, w["router"], w["bias"], *ROUTE)
    y = y + moe(x, chosen, weights, list(zip(w["gates"], w["ups"], w["downs"], strict=True)), EXPERTS, ranks)
    (y * y.detach().cos()).sum().backward()
    first: Named = {}
    for (_, name, place), leaf in named.items():
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        if place is None and name in ("q", "k", "v", "o", "router"):
            all_reduce(grad, ranks)
            first[0, name, None] = grad
        elif place is not None and leaf.grad is not None:
            first[0, name, place + rank * here] = grad
    return [], first | {(0, "x", None): x.grad}, {(0, "y", None): y.detach()}


ORDERS = {  # positions, members of a group, stages, microbatches
    "DualPipe": (2, 2, 2, 6),
    "DualPipeV": (2, 2, 4, 5),
    "GPipe": (2, 2, 2, 3),
    "1F1B": (2, 2, 2, 5),
    "ZB-H1": (2, 2, 2, 4),
}


def together_case(order: str, num_steps: int) -> Case:
    """A small model with experts on 4 ranks, under one of the orders."""
    positions, size, *_ = ORDERS[order]
    return Case(
        *(order, _together, (order, num_steps), positions * size),
        *(partial(_together_reference, order, num_steps), partial(_together_piece, size)),
    )


def _together_cases(num_steps: int) -> list[Case]:
    return [together_case("DualPipe", num_steps), together_case("DualPipeV", min(num_steps, 3))]


def _together_reference(order: str, num_steps: int) -> "Trained":
    from dualpipe_ours.plain_model import make_batch, make_layers, train

    *_, num_microbatches = ORDERS[order]
    return train(make_layers(4), [make_batch(num_microbatches, TOKENS, step) for step in range(num_steps)])


def _together_piece(size: int, whole: "Tensor", name: "Name", rank: int) -> "Tensor":
    dimension = {"up": 0, "down": 1}.get(name[1])
    return whole if dimension is None else whole.chunk(size, dimension)[rank % size]


def _together(rank: int, order: str, num_steps: int) -> "tuple[list[float], Named, Named]":
    """Train; raw gradients of the first step are summed over the ranks of `sums`, on copies."""
    import torch
    from mine.held import holders, sums
    from mine.ring import all_reduce
    from mine.rows_1f1b import one_f_one_b_rows
    from mine.rows_dualpipe import dualpipe_place, dualpipe_rows
    from mine.rows_dualpipev import dualpipev_place, dualpipev_rows
    from mine.rows_gpipe import gpipe_place, gpipe_rows
    from mine.rows_zb_h1 import zb_h1_rows
    from mine.train import Trainer

    from dualpipe_ours.plain_model import EXPERTS, HEADS, LR, ROUTE, leaves, make_batch, make_layers

    positions, size, num_stages, num_microbatches = ORDERS[order]
    rows_of = {"DualPipe": dualpipe_rows, "DualPipeV": dualpipev_rows, "GPipe": gpipe_rows}
    rows_of |= {"1F1B": one_f_one_b_rows, "ZB-H1": zb_h1_rows}
    places = {"DualPipe": dualpipe_place(positions, num_microbatches), "DualPipeV": dualpipev_place(positions)}
    rows, member = rows_of[order](positions, num_microbatches), rank % size
    trainer = Trainer(make_layers(4), rows, places.get(order, gpipe_place), num_stages, size, HEADS, ROUTE, LR)
    named: Named = {}
    for stage, ws in trainer.held.items():
        for (number, name, place), leaf in leaves(ws).items():
            whole = None if place is None else place + member * (EXPERTS // size)
            named[stage * (4 // num_stages) + number, name, whole] = leaf
    losses: list[float] = []
    first: Named = {}
    for step in range(num_steps):
        losses.append(trainer.step(*make_batch(num_microbatches, TOKENS, step)))
        if step == 0:
            names = {id(leaf): name for name, leaf in named.items()}
            for stage, ws in trainer.held.items():
                for leaves_of, ranks in sums(ws, holders(rows)[stage], member, size):
                    for leaf in leaves_of:
                        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone()
                        all_reduce(grad, ranks)
                        first[names[id(leaf)]] = grad
    return losses, first, {name: leaf.detach() for name, leaf in named.items()}


CASES: dict[str, Callable[[int], list[Case]]] = {
    "dense": _dense_cases,
    "pipeline": _pipeline_cases,
    "experts": _expert_cases,
    "together": _together_cases,
}
