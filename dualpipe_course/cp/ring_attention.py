"""Exercises of "Ring attention": the part `ring_attention`, and an LSE that is not the row's.

Chapter: book/cp/ring-attention.  The part is judged beside attention to the whole sequence, bytes by the ledger.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.comparison import Found, Limit, Numbers, Off, in_words
from dualpipe_course.declared import Repair
from dualpipe_course.meter import MemoryMeter, Meter
from dualpipe_course.own import rules
from dualpipe_course.own.part import OnRanks, Part
from dualpipe_course.start.ranks import all_waited_for
from dualpipe_course.switched_off import AUTOGRAD

if TYPE_CHECKING:
    from torch import Tensor


LIBRARY = tuple(
    f"dualpipe_lab.cp.{name}"
    for name in ("flash_attention", "online_softmax", "ring", "ring_attention", "all_gather_attention")
)
HEADS, SIZE = 2, 3
# ranks, the group, positions of each of its ranks, by what scores are larger, microbatches under way
RINGS = (
    (1, [0], 3, 1, 1),
    (2, [0, 1], 2, 1, 1),
    (2, [1, 0], 3, 1, 1),
    (3, [0, 1, 2], 1, 1, 1),
    (4, [3, 1], 2, 1, 1),
    (4, [0, 1, 2, 3], 4, 1, 1),
    (3, [2, 0, 1], 2, 60, 1),
    (2, [0, 1], 2, 1, 2),
    (2, [0, 1], 0, 1, 1),
)


class Row(NamedTuple):
    """Queries, blocks of keys by their lengths, the last key that a query sees less its number (None: all), scale.

    A rise is by how much scores are larger in each block than in the one before; for odd queries they are smaller.
    """

    queries: int
    lengths: tuple[int, ...]
    offset: int | None = None
    scale: float = 1.0
    rise: float = 0.0

    def __str__(self) -> str:
        mask = "" if self.offset is None else f", query i sees the keys up to i{self.offset:+}"
        large = ", large scores" if self.scale > 1 else ""
        rise = f", scores {self.rise:g} higher in each block than in the last (odd queries: lower)" if self.rise else ""
        return f"{self.queries} queries, blocks of {list(self.lengths)} keys{mask}{large}{rise}"


KEPT = (
    Row(2, (3,)), Row(2, (2, 2)), Row(4, (2, 2), 0), Row(4, (2, 2, 2), 1), Row(4, (2, 3, 1), -2),
    Row(2, (3, 3), None, 60.0), Row(3, (2, 1, 2), 0, 1.0, 1600.0),
)  # fmt: skip


def _round_the_ring(
    rank: int, world_size: int, ranks: list[int], positions: int, scale: int, microbatches: int
) -> Found:
    """Forwards of all microbatches, then their backwards; bytes sent, and bytes kept in between."""
    from mine.ring_attention import RingAttention

    if rank not in ranks:
        return Found({}, costs={"forward": 0, "backward": 0, "kept": 0})
    own = slice(ranks.index(rank) * positions, (ranks.index(rank) + 1) * positions)
    numbers = range(microbatches)
    given = [[x[:, own].transpose(0, 1).contiguous() for x in _whole(ranks, positions, scale, i)] for i in numbers]
    leaves = [[x.requires_grad_() for x in qkv] for *qkv, _ in given]
    memory, meter = MemoryMeter(), Meter()
    outs = [RingAttention.apply(*(x.transpose(0, 1) for x in qkv), ranks) for qkv in leaves]  # strided, by head
    forward = meter.lap().bytes
    all_waited_for()
    kept = memory.grown()
    meter.lap()
    if any(out.shape != (HEADS, positions, SIZE) for out in outs):
        raise ValueError(f"out has shape {list(outs[0].shape)}, as q it is {[HEADS, positions, SIZE]}")
    for out, (*_, dout) in zip(outs, given, strict=True):
        out.backward(dout.transpose(0, 1))
    all_waited_for()
    found: dict[str, Tensor | None] = {}
    slips: dict[str, Mapping[str, Numbers | None]] = {}
    for i in numbers:
        of = f" of microbatch {i}" if microbatches > 1 else ""
        q, k, v = (None if x.grad is None else x.grad.transpose(0, 1) for x in leaves[i])
        found |= {f"out{of}": outs[i], f"dv{of}": v, f"dk{of}": k, f"dq{of}": q}
        slips |= {f"{name}{of}": words for name, words in _typical(ranks, positions, scale, i, own).items()}
    costs = {"forward": forward, "backward": meter.lap().bytes, "kept": kept}
    return Found({name: Numbers.of(value) for name, value in found.items()}, slips=slips, costs=costs)


def _one_sequence(
    rank: int, world_size: int, ranks: list[int], positions: int, scale: int, microbatches: int
) -> "dict[str, Tensor | None]":
    """Causal attention to the whole sequence, of which a rank has its part."""
    found: dict[str, Tensor | None] = {}
    for i in range(microbatches):
        of = f" of microbatch {i}" if microbatches > 1 else ""
        q, k, v, dout = _whole(ranks, positions, scale, i)
        p, dp = _scores(q, k).softmax(-1), dout @ v.mT
        ds = SIZE**-0.5 * p * (dp - (p * dp).sum(-1, keepdim=True))
        whole = {"out": p @ v, "dv": p.mT @ dout, "dk": ds.mT @ q, "dq": ds @ k}
        me = ranks.index(rank) if rank in ranks else None
        own = slice(0) if me is None else slice(me * positions, (me + 1) * positions)
        found |= {f"{name}{of}": None if me is None else value[:, own] for name, value in whole.items()}
    return found


def _typical(
    ranks: list[int], positions: int, scale: int, microbatch: int, own: slice
) -> "dict[str, dict[str, Numbers | None]]":
    """What typical mistakes make of the values: weights, or what is subtracted from dP, of each block alone."""
    q, k, v, dout = _whole(ranks, positions, scale, microbatch)
    s, dp = _scores(q, k), dout @ v.mT
    by_block = (*s.shape[:2], len(ranks), positions)
    p, alone = s.softmax(-1), s.view(by_block).softmax(-1).nan_to_num(0).view_as(s)
    of_block = (p * dp).view(by_block).sum(-1, keepdim=True).expand(by_block).reshape(s.shape)
    ds = SIZE**-0.5 * p * (dp - of_block)
    add = (
        "its weights add up to 1 in every block. A query's weights add up to 1 over the keys of all ranks: merge states"
    )
    lse = (
        "its weights add up to 1 in every block. They are exp(score - LSE) with the LSE of all keys, which the forward "
        "has to keep"
    )
    delta = "what is subtracted from dP was summed over one block; dout . out is the sum over the keys of all ranks"
    return {
        "out": {add: Numbers.of((alone @ v)[:, own])},
        "dv": {lse: Numbers.of((alone.mT @ dout)[:, own])},
        "dk": {delta: Numbers.of((ds.mT @ q)[:, own])},
        "dq": {delta: Numbers.of((ds @ k)[:, own])},
    }


def _whole(ranks: list[int], positions: int, scale: int, microbatch: int) -> "list[Tensor]":
    """Queries, keys, values and the gradient of the output of the whole sequence: (heads, N positions, size)."""
    import torch

    generator = torch.Generator().manual_seed(10 * len(ranks) + microbatch)
    shape = HEADS, len(ranks) * positions, SIZE
    q, *rest = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(4))
    return [scale * q, *rest]


def _scores(q: "Tensor", k: "Tensor") -> "Tensor":
    import torch

    scores = q @ k.mT * SIZE**-0.5
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)


def _ring_costs(world_size: int, ranks: list[int], positions: int, scale: int, microbatches: int) -> list[Limit]:
    num, one = len(ranks), HEADS * positions * SIZE * 8
    there = "rank {rank} sent {found} bytes in the forward; N - 1 hops of keys and values are {most}"
    back = (
        "rank {rank} sent {found} bytes in the backward; N - 1 hops of keys and values and N of their gradients are "
        "{most}"
    )
    kept = (
        "{found} bytes were alive after the forward that were not before, and {most} are enough: out, one LSE per "
        "query, and q, k, v of this rank. Blocks of other ranks come by once more in the backward"
    )
    forward, backward = (microbatches * hops * 2 * one for hops in (num - 1, 2 * num - 1))
    limits = [Limit("forward", forward, there, scope="largest"), Limit("backward", backward, back, scope="largest")]
    return [*limits, Limit("kept", 7 * one, kept, scope="largest")] if num == 4 else limits


def _why_not_attention(off: Off) -> str:
    if off.found is None or off.has_other_shape or off.slip:
        return in_words(off)
    name = off.name[:3].strip()
    owner = [rank for rank, value in enumerate(off.by_rank) if value and off.expected.equals(value)]
    if name in ("dv", "dk") and owner:
        return (
            f"{off.name} is another rank's, and rank {owner[0]} has this one: after N - 1 hops all ranks have added to "
            "the gradients of a block, and one more hop takes them to its owner"
        )
    if "microbatch" in off.name:
        return f"{in_words(off)}. One microbatch is right; here two forwards ran first: what each keeps is on its ctx"
    if any(value != value for value in off.found.flat):
        return f"{off.name} is not a number: begin with the rank's own block, of which every query sees a key"
    if name == "out":
        return f"{in_words(off)}. Step i brings the block of rank me - i; where i > me, that rank is a later one"
    if name == "dv":
        return f"{in_words(off)}. The weights of the backward are exp(score - LSE), with the LSE of all keys"
    if name == "dk":
        return f"{in_words(off)}. dv is right, so the weights are; dS = P (dP - dout . out), times size^-0.5"
    if name == "dq":
        return f"{in_words(off)}. dv and dk are right; dq stays on its rank, and every block adds dS k to it"
    return in_words(off)


def _drawn(row: Row) -> "tuple[list[Tensor], Tensor]":
    """Queries, keys, values and the gradient of the output, and which pairs are hidden."""
    import torch

    keys = sum(row.lengths)
    generator = torch.Generator().manual_seed(keys)
    sizes = row.queries, keys, keys, row.queries
    q, k, v, do = (torch.randn(size, SIZE, dtype=torch.float64, generator=generator) for size in sizes)
    q, k = row.scale * q, row.scale * k
    if row.rise:  # in the first column, as large in q as in k: no gradient is off by much
        factor, blocks = SIZE**0.25 * row.rise**0.5, torch.arange(len(row.lengths)).double()
        q[:, 0] = factor * (1 - 2 * (torch.arange(row.queries) % 2))
        k[:, 0] = row.rise * blocks.repeat_interleave(torch.tensor(row.lengths)) * SIZE**0.5 / factor
    last = keys if row.offset is None else torch.arange(row.queries)[:, None] + row.offset
    return [q, k, v, do], (torch.arange(keys) > last).expand(row.queries, keys)


def block_backward(
    do: "Tensor", q: "Tensor", k: "Tensor", v: "Tensor", out: "Tensor", lse: "Tensor", hidden: "Tensor"
) -> "tuple[Tensor, Tensor, Tensor]":
    """What one block adds to dQ, its dK and its dV, if output and LSE are those of whole rows."""
    scale = q.shape[1] ** -0.5
    p = (scale * q @ k.T - lse[:, None]).exp().masked_fill(hidden, 0)
    ds = scale * p * (do @ v.T - (do * out).sum(1, keepdim=True))
    return ds @ k, ds.T @ q, p.T @ do


def _from_blocks(rank: int, world_size: int, fn: Callable[..., Any], row: Row) -> Found:
    """Gradients by an answer, which knows output and LSE of each block."""
    import torch

    (q, k, v, do), hidden = _drawn(row)
    blocks = list(zip(*(x.split(row.lengths) for x in (k, v)), hidden.split(row.lengths, 1), strict=True))
    found = []
    for keys, values, mask in blocks:
        scores = (q @ keys.T * SIZE**-0.5).masked_fill(mask, -torch.inf)
        found.append((scores.softmax(1).nan_to_num(0) @ values, scores.logsumexp(1)))
    lse = torch.stack([own for _, own in found]).logsumexp(0)
    slips: dict[str, dict[str, Numbers | None]] = {}
    for words, known in {
        "of each block alone: its weights add up to 1 in every block": found,
        "with the output of the block: what is subtracted from dP is a sum over the keys of all blocks": [
            (out, lse) for out, _ in found
        ],
    }.items():
        parts = [
            block_backward(do, q, keys, values, *of, mask)
            for (keys, values, mask), of in zip(blocks, known, strict=True)
        ]
        for name, value in _by_name(sum(part[0] for part in parts), [part[1:] for part in parts]).items():
            slips.setdefault(name, {})[f"that is the gradient {words}"] = Numbers.of(value)
    answer = fn(do.clone(), q.clone(), blocks, found, block_backward)
    if not isinstance(answer, tuple) or len(answer) != 2:
        return Found({}, refused=f"expected (dq, list of (dk, dv)), got {type(answer).__name__}")
    pairs = answer[1]
    if not isinstance(pairs, (list, tuple)) or [len(pair) for pair in pairs] != [2] * len(blocks):
        return Found({}, refused=f"expected a pair (dk, dv) for each of {len(blocks)} block(s)")
    return Found({name: Numbers.of(value) for name, value in _by_name(*answer).items()}, slips=slips)


def _by_name(dq: Any, pairs: Any) -> dict[str, Any]:
    named = {f"dV of block {place}": dv for place, (_, dv) in enumerate(pairs)}
    return named | {f"dK of block {place}": dk for place, (dk, _) in enumerate(pairs)} | {"dQ": dq}


def _of_whole_rows(rank: int, world_size: int, row: Row) -> "dict[str, Tensor]":
    import torch

    (q, k, v, do), hidden = _drawn(row)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    is_blind = hidden.all(1, keepdim=True)
    scores = (q @ k.T * SIZE**-0.5).masked_fill(hidden & ~is_blind, -torch.inf)
    dq, dk, dv = torch.autograd.grad(scores.softmax(1).masked_fill(is_blind, 0) @ v, leaves, do)
    return _by_name(dq, list(zip(*(x.split(row.lengths) for x in (dk, dv)), strict=True)))


def _why_not_whole_rows(off: Off) -> str:
    if off.found is not None and any(value != value for value in off.found.flat):
        return f"{off.name} contains NaN; a query may see nothing, and -inf - (-inf) is not a number"
    return in_words(off)


ring_attention = Part(
    "ring_attention-7",
    "ring_attention",
    "Attention round a ring",
    "Write RingAttention: causal attention of this rank's positions to those of all ranks, forward and backward.",
    names=("RingAttention",),
    off=(*rules.AUTOGRAD, *rules.ATTENTION),
    trials=(
        OnRanks(
            _round_the_ring,
            RINGS,
            _one_sequence,
            "group {1} of {0} rank(s), {2} positions each, queries times {3}, {4} microbatch(es)",
            _ring_costs,
            _why_not_attention,
        ),
    ),
    right=f"output and gradients in {len(RINGS)} rings of 1 to 4 ranks, at home after N hops, and no block is kept",
    minutes=90,
    points=5,
    hints=(
        "Forward: the state of the own block, where later positions are hidden, then N - 1 times: pass on what came "
        "last and merge its state. Step i brings the block of rank me - i: of an earlier rank all is seen, of a later "
        "one (i > me) nothing.",
        "Keep q, k, v, out = sum / total and LSE = top + log(total). Backward: delta = (dout * out).sum(-1), over all "
        "keys; for each block weights = exp(scores - LSE), ds = weights * (dout @ v.mT - delta) * size^-0.5.",
        "dq += ds @ k stays. grads += torch.stack([ds.mT @ q, weights.mT @ dout]) travels with its block: grads = "
        "pass_on(grads, grads, ranks) in all N steps, the block in N - 1. With one rank nothing is passed on.",
    ),
)


whole_rows = Repair(
    "ring_attention-4",
    "The LSE at hand",
    "Repair a backward that gives every block its own output and LSE.",
    cases=[(1, row) for row in KEPT],
    run=_from_blocks,
    reference=_of_whole_rows,
    why=_why_not_whole_rows,
    named="{1}",
    tolerance=1e-9,
    without=(*LIBRARY, *AUTOGRAD),
    right=f"gradients equal the formula in {len(KEPT)} cases, queries that see nothing of a block, or of any, included",
    minutes=15,
    points=3,
    trail=True,
    hints=(
        "With a single block it is right. Give it two, and add up the dV of both: whose sum should that be?",
        "exp(s - lse) are a query's weights among all keys if lse is that of all keys. What makes one LSE of several?",
        "do . out is a sum over all keys too, so the blocks' outputs have to be merged: each counts by exp of its LSE "
        "less the merged one. Which queries have a merged LSE of -inf?",
    ),
)
