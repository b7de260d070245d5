"""Exercises of "Ring attention": the part `ring_attention`, a layout, an LSE that is not the row's.

Chapter: book/cp/ring-attention.  The part is judged beside attention to the whole sequence, bytes by the ledger.
The puzzle shards a packed sequence over the ranks of a ring:
  a query sees     the keys of its own document, up to itself
  a step           rank r has the block of rank r - i; it lasts as long as its busiest rank
  bound            all visible pairs over the ranks, rounded up
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.comparison import Found, Limit, Numbers, Off, in_words
from dualpipe_course.cp.flash_attention import LIBRARY
from dualpipe_course.cp.tiles import Row, check_kept
from dualpipe_course.declared import Puzzle, Repair
from dualpipe_course.meter import MemoryMeter, Meter
from dualpipe_course.own import rules
from dualpipe_course.own.part import OnRanks, Part
from dualpipe_course.plain import plain
from dualpipe_course.start.ranks import all_waited_for
from dualpipe_course.switched_off import AUTOGRAD, Without
from dualpipe_course.trial import partial_score
from dualpipe_course.wrong import Wrong
from dualpipe_lab.cp.layouts import make_layout

if TYPE_CHECKING:
    from torch import Tensor


class Case(NamedTuple):
    """A layout by name, its positions and ranks."""

    layout: str
    length: int
    num_ranks: int

    def __str__(self) -> str:
        return f"{self.length} positions on {self.num_ranks} rank(s), {self.layout}"

    def where(self) -> list[list[int]]:
        """The positions of each rank."""
        layout = make_layout(self.layout, self.length, self.num_ranks)
        return [layout.positions(rank) for rank in range(self.num_ranks)]


RING = tuple(f"dualpipe_lab.cp.{name}" for name in ("ring", "ring_attention", "all_gather_attention"))
HEADS, SIZE = 2, 3
CONTIGUOUS = 81  # the critical path of the two documents, cut contiguously
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
KEPT = [
    Row(2, (3,)), Row(2, (2, 2)), Row(4, (2, 2), 0), Row(4, (2, 2, 2), 1), Row(4, (2, 3, 1), -2),
    Row(2, (3, 3), None, 60.0), Row(3, (2, 1, 2), 0, 1.0, 1600.0),
]  # fmt: skip
PARTS = (
    (Case("contiguous", 4, 1), [4]), (Case("contiguous", 6, 2), [6]), (Case("contiguous", 6, 2), [2, 4]),
    (Case("striped", 5, 2), [1, 3, 1]), (Case("zigzag", 12, 3), [5, 7]), (Case("zigzag", 12, 3), [3, 1, 8]),
)  # fmt: skip
DOCUMENTS = (16, 8)  # lengths
RANKS, BUDGET = 4, 46
LENGTH = sum(DOCUMENTS)
ROOM = LENGTH // RANKS
_DOCUMENT = [number for number, size in enumerate(DOCUMENTS) for _ in range(size)]
BOUND = -(-sum(size * (size + 1) // 2 for size in DOCUMENTS) // RANKS)


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


def _parse(answer: object) -> list[list[int]]:
    """Return an answer as positions by rank; raise `Wrong` for anything that is no way to deal them out."""
    found = plain(answer)
    if not isinstance(found, list) or len(found) != RANKS:
        raise Wrong(f"this check takes {RANKS} lists of positions, one per rank")
    ranks: list[list[Any]] = [held if isinstance(held, list) else [held] for held in found]
    given = [position for held in ranks for position in held]
    if any(position is ... for position in given):
        raise Wrong("not answered yet: put the positions of each rank in place of the dots")
    if not all(type(position) is int for position in given):
        raise Wrong("positions are whole numbers, from 0")
    for position in range(LENGTH):
        if (times := given.count(position)) != 1:
            raise Wrong(f"position {position} is on {times} ranks; each of 0 to {LENGTH - 1} belongs to one")
    if len(given) != LENGTH:
        raise Wrong(f"there are positions 0 to {LENGTH - 1}, got {sorted(set(given) - set(range(LENGTH)))} as well")
    if (most := max(map(len, ranks))) > ROOM:
        raise Wrong(f"a rank has room for {ROOM} positions, and one would hold {most}")
    return ranks


def _pairs(ranks: list[list[int]]) -> list[list[int]]:
    """Visible pairs by rank and step."""
    return [
        [sum(_sees(i, j) for i in held for j in ranks[(rank - step) % RANKS]) for step in range(RANKS)]
        for rank, held in enumerate(ranks)
    ]


def _critical_path(ranks: list[list[int]]) -> int:
    """The sum over the steps of what the busiest rank computes.

    >>> _critical_path([list(range(rank, 24, 4)) for rank in range(4)])
    52
    """
    return sum(max(step) for step in zip(*_pairs(ranks), strict=True))


def _sees(i: int, j: int) -> bool:
    return j <= i and _DOCUMENT[i] == _DOCUMENT[j]


def _judge_layout(answer: object) -> str:
    ranks = _parse(answer)
    path, budget, bound = _critical_path(ranks), BUDGET, BOUND
    if path > budget:
        steps = list(zip(*_pairs(ranks), strict=True))
        slowest = max(range(len(steps)), key=lambda i: max(steps[i]) - min(steps[i]))
        raise Wrong(
            f"the critical path is {path}, the budget {budget}; no layout is below {bound}. Least even is step "
            f"{slowest}, with {', '.join(map(str, steps[slowest]))} pairs on the four ranks",
            score=partial_score(path, CONTIGUOUS, bound),
        )
    return f"a path within {budget}; a ring cannot go below {bound}"


def _judge_whole_rows(fn: Callable[..., Any]) -> str:
    check_kept(Without(fn, *LIBRARY, *RING, *AUTOGRAD), KEPT)
    return f"gradients equal the formula in {len(KEPT)} cases, queries that see nothing of a block, or of any, included"


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

layout = Puzzle(
    "ring_attention-3",
    "Two documents",
    "Deal out a sequence of two documents so that the ring's critical path is within the budget.",
    judge=_judge_layout,
    minutes=15,
    points=3,
    hints=(
        "The zigzag of the whole sequence has a path of 75, stripes have 52. What does zigzag assume about pairs?",
        "A document is a triangle of its own. What balances one triangle?",
        "Eight chunks of two positions of the first document, eight of one of the second. Which does rank 0 get?",
    ),
)

whole_rows = Repair(
    "ring_attention-4",
    "The LSE at hand",
    "Repair a backward that gives every block its own output and LSE.",
    judge=_judge_whole_rows,
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
