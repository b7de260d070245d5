"""Exercises of "GQA": what a rank holds and sends, who reads which head, the backward of the projections, a step.

Chapter: book/tp/gqa.  Gradients and weights are judged against one process, messages by the ledger.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off, compare_on_ranks, other_dtype
from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.differences import difference
from dualpipe_course.switched_off import Without
from dualpipe_course.tp import layers
from dualpipe_course.trial import call_each, ended
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("KV head", "numbers held", "bytes cached", "bytes sent for copies")
_SLIPS = (
    {
        0: "neighbours share a KV head, and rank 2 has query heads 4 and 5; heads are not dealt out in turn",
        2: "there are two KV heads, 0 and 1, for four ranks",
    },
    {
        640: "W_k and W_v are two; and a rank has a whole head of each, never half of one",
        2560: "that is both KV heads; a rank's query heads read one of them",
        320: "a rank has a whole KV head, never half of one",
    },
    {
        32: "a float32 has 4 bytes",
        64: "keys and values are two, and a head of each is whole here",
        256: "that is both KV heads; this rank reads one",
        1024: "one KV head serves all query heads of its group; they have no keys of their own",
    },
    {
        0: "another rank holds the same KV head, and its query heads contribute to it",
        2560: "two gradients are summed, and what is sent passes twice: as a partial sum and finished",
        7680: "two ranks hold this head, not four",
        10240: "of two passes over 2 ranks, half of the bytes each leave a rank",
        1280: "count bytes: a float32 has 4",
    },
)
TOKENS, HIDDEN, HEAD = 5, 3, 2
BY_HAND = "torch.autograd:grad", "torch:enable_grad", "dualpipe_lab.tp.gqa"  # switched off, with the other layers
CASES = ((1, 2, 1), (2, 4, 2), (2, 2, 1), (4, 4, 4), (4, 4, 2), (4, 4, 1))  # ranks, query heads, KV heads
STEPS = ((2, 4, 2, 1), (2, 2, 1, 1), (4, 4, 2, 2), (4, 4, 1, 3))  # and microbatches
RATE = 0.5
Span = tuple[int, int]


def _cases() -> Iterator[tuple[int, int, int, int]]:
    """Ranks, query heads and KV heads that divide, the smallest first."""
    for num_ranks in (1, 2, 3, 4, 6, 8):
        for num_heads in (1, 2, 4, 6, 8, 12):
            for num_kv_heads in range(1, num_heads + 1):
                fits = num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0
                if fits and num_heads % num_kv_heads == 0 and num_heads % num_ranks == 0:
                    yield from ((rank, num_ranks, num_heads, num_kv_heads) for rank in range(num_ranks))


def _why_heads(found: Any, rank: int, num_ranks: int, num_heads: int, num_kv_heads: int) -> str | None:
    try:
        queries, keys, holders = (list(map(int, part)) for part in found)
    except (TypeError, ValueError):
        return "return three sequences of numbers: query heads, KV heads, ranks"
    size, group = num_heads // num_ranks, num_heads // num_kv_heads
    if queries != list(range(rank * size, (rank + 1) * size)):
        return f"query heads {queries}; a rank has {size} neighbours, and rank 0 begins with head 0"
    read = sorted({query // group for query in queries})
    for query in queries:
        if query // group not in keys:
            return f"query head {query} is here, and the KV head that it reads is not among {keys}"
    if keys != read:
        return f"KV heads {keys}, while query heads {queries} read {len(read)}; name each of these once, in order"
    num_copies = max(num_ranks // num_kv_heads, 1)
    first = rank // num_copies * num_copies
    if missing := sorted(set(range(first, first + num_copies)) - set(holders)):
        return f"rank {missing[0]} reads the same KV heads, and is not among the ranks {holders}"
    if holders != list(range(first, first + num_copies)):
        return f"among the ranks {holders} is one whose query heads read other KV heads, or one twice"
    return None


def _check_projections(fn: Callable[..., Any], num_ranks: int, num_heads: int, num_kv_heads: int) -> None:
    """Raise `Wrong` unless the gradients are those of one process, for as many bytes as they need."""
    num_copies = max(num_ranks // num_kv_heads, 1)
    needed = 2 * (num_ranks - 1) * 8 * TOKENS * HIDDEN
    needed += num_ranks // num_copies * 2 * (num_copies - 1) * 8 * (2 * HEAD * HIDDEN)
    words = (
        "all-reduces sent {found:,} bytes in all, {most:,} are needed: one sum of dx over all ranks, "
        "and what the holders of the same KV head owe each other"
    )
    compare_on_ranks(
        _project,
        num_ranks,
        Without(fn, *layers.LIBRARY, *BY_HAND),
        num_heads,
        num_kv_heads,
        case=_named(num_ranks, num_heads, num_kv_heads),
        limits=[Limit("bytes of all_reduce", needed, words, needed)],
    )


def _check_step(fn: Callable[..., Any], num_ranks: int, num_heads: int, num_kv_heads: int, num: int) -> None:
    """Raise `Wrong` unless all weights are those of one process after a step of `num` microbatches."""
    spans = [_spans(rank, num_ranks, num_heads, num_kv_heads) for rank in range(num_ranks)]
    compare_on_ranks(
        _train,
        num_ranks,
        fn,
        num_heads,
        num_kv_heads,
        num,
        case=f"{_named(num_ranks, num_heads, num_kv_heads)}, {num} microbatch(es)",
        at=": ",
        why=lambda off: _step_in_words(off, spans),
    )


def _held(name: str, spans: tuple[Span, Span]) -> Span:
    """Which part of a tensor a rank holds: copies hold the same."""
    return (0, 0) if name == "dx" else spans["k" in name or "v" in name]


def _step_in_words(off: Off, spans: Sequence[tuple[Span, Span]]) -> str:
    assert off.found is not None, "a weight has gone"
    held = [_held(off.name, span) for span in spans]
    for other, theirs in enumerate(off.by_rank):
        if theirs is None or held[other] != held[off.rank]:
            continue
        if (between := difference(theirs.flat, off.found.flat)) is not None:
            return (
                f"ranks {off.rank} and {other} hold copies of the same rows of {off.name}, and after one step "
                f"these are {between.error:.2g} apart, though all ranks found the same loss"
            )
    if off.ratio is None:
        return f"rank {off.rank}: numbers of {off.name} {off.difference}"
    return f"rank {off.rank}: {off.name} has moved {off.ratio:.4g} times as far as on one process"


def _named(num_ranks: int, num_heads: int, num_kv_heads: int) -> str:
    return f"{num_ranks} rank(s), {num_heads} query and {num_kv_heads} KV head(s)"


def _spans(rank: int, num_ranks: int, num_heads: int, num_kv_heads: int) -> tuple[Span, Span]:
    """Features of the rank's query heads, and of the KV heads that they read."""
    size, group = num_heads // num_ranks, num_heads // num_kv_heads
    first, last = rank * size, (rank + 1) * size - 1
    return (first * HEAD, (last + 1) * HEAD), (first // group * HEAD, (last // group + 1) * HEAD)


def _project(rank: int, world_size: int, fn: Callable[..., Any], num_heads: int, num_kv_heads: int) -> Found:
    import torch

    from dualpipe_lab.tp.shard import TensorParallel

    group = TensorParallel().neighbours(world_size // num_kv_heads) if world_size > num_kv_heads else None
    queries, keys = (slice(*span) for span in _spans(rank, world_size, num_heads, num_kv_heads))
    x, d_queries = layers.draw("x", (TOKENS, HIDDEN)), layers.draw("dQ", (TOKENS, num_heads * HEAD))
    sizes = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads}
    q, k, v = (layers.draw(name, (size * HEAD, HIDDEN)) for name, size in sizes.items())
    (d_keys, own_keys), (d_values, own_values) = (
        _contributed(name, queries, keys, num_heads, num_kv_heads) for name in ("dK", "dV")
    )
    arguments = [d_queries[:, queries].contiguous(), own_keys, own_values, x, q[queries], k[keys], v[keys]]
    given = [argument.clone() for argument in arguments]
    found = fn(*given, group)
    if not isinstance(found, (tuple, list)) or len(found) != 4 or not all(isinstance(t, torch.Tensor) for t in found):
        raise TypeError("return four tensors: dx, dq, dk, dv")
    dq, dk, dv = (grad.t() @ x for grad in (d_queries, d_keys, d_values))
    expected = {"dx": d_queries @ q + d_keys @ k + d_values @ v, "dq": dq[queries], "dk": dk[keys], "dv": dv[keys]}
    same = all(a.equal(b) for a, b in zip(given, arguments, strict=True))
    return Found(
        {name: Numbers.of(ours) for name, ours in zip(expected, found, strict=True)},
        {name: Numbers.of(theirs) for name, theirs in expected.items()},
        refused=other_dtype(x, *found),
        changed="" if same else "an argument has changed; send what you have computed",
    )


def _contributed(name: str, queries: slice, keys: slice, num_heads: int, num_kv_heads: int) -> "tuple[Tensor, Tensor]":
    """Gradients of all KV heads, and what these query heads contribute to those that they read."""
    import torch

    heads = num_kv_heads, num_heads // num_kv_heads, HEAD
    part = layers.draw(name, (TOKENS, num_heads * HEAD)).unflatten(1, heads)
    is_here = torch.zeros(num_heads * HEAD, dtype=torch.float64)
    is_here[queries] = 1
    own = (part * is_here.unflatten(0, heads)).sum(2).flatten(1)
    return part.sum(2).flatten(1), own[:, keys].contiguous()


def _train(rank: int, world_size: int, fn: Callable[..., Any], num_heads: int, num_kv_heads: int, num: int) -> Found:
    import torch

    from dualpipe_lab.models.llama_config import LlamaConfig
    from dualpipe_lab.models.plain_llama import PlainAttention
    from dualpipe_lab.tp.gqa import GroupedQueryAttention
    from dualpipe_lab.tp.shard import TensorParallel, load_full_state_dict, shards_of

    torch.manual_seed(num)
    plain = PlainAttention(LlamaConfig(2, HIDDEN, 1, 1, num_heads, num_kv_heads, head_size=HEAD), torch.float64)
    batch = [torch.randn(2, 1, TOKENS, HIDDEN, dtype=torch.float64).unbind() for _ in range(num)]
    layer = GroupedQueryAttention(
        HIDDEN, num_heads, num_kv_heads, HEAD, tp=TensorParallel(coalesce=True), dtype=torch.float64
    )
    load_full_state_dict(layer, plain.state_dict())
    before = {name: weight.detach().clone() for name, weight in plain.named_parameters()}
    fn(layer, torch.optim.SGD(layer.parameters(), lr=RATE), [(x.clone(), target.clone()) for x, target in batch])
    for x, target in batch:
        ((plain(x, torch.arange(TOKENS)) - target).square().mean() / num).backward()
    torch.optim.SGD(plain.parameters(), lr=RATE).step()
    expected, shards = dict(plain.named_parameters()), shards_of(layer)
    moved, right = {}, {}
    for name, weight in sorted(layer.named_parameters()):
        of = shards[name].of
        moved[f"W_{name[0]}"] = Numbers.of(weight - of(before[name]))
        right[f"W_{name[0]}"] = Numbers.of(of(expected[name]) - of(before[name]))
    return Found(moved, right)


def _judge_heads(fn: Callable[..., Any]) -> str:
    cases = list(_cases())
    for case, (fine, found) in zip(cases, call_each(fn, cases), strict=True):
        rank, num_ranks, num_heads, num_kv_heads = case
        where = f"rank {rank} of {num_ranks}, {num_heads} query heads and {num_kv_heads} KV head(s)"
        if not fine:
            raise Wrong(ended(where, found))
        if (problem := _why_heads(found, *case)) is not None:
            raise Wrong(f"{where}: {problem}")
    return f"query heads, KV heads and their holders are right in {len(cases)} cases, MQA and MHA included"


numbers = Predict(
    "gqa-1",
    "Eight heads that read two",
    NAMES,
    lambda d: (1, 80 * d, 8 * d, 320 * d),
    "2 KV heads of {d} features",
    minutes=8,
    points=1,
    hints=(
        "Four neighbours read one KV head. Rank 2 has query heads 4 and 5.",
        "One KV head of 16 features: 16 rows of 40 in W_k, and as many in W_v. Per token, 16 keys and 16 values.",
        "Two ranks hold it, so the sum sends 2 (2 - 1) / 2 of the bytes of dW_k and dW_v.",
    ),
    slips=_SLIPS,
    d=(16, *range(4, 97, 4)),
    called={"d": "features of a head"},
)

heads = Implement(
    "gqa-2",
    "Who reads what, and who else",
    "Write `heads_of(rank, num_ranks, num_heads, num_kv_heads)`: query heads, KV heads, ranks with these.",
    judge=_judge_heads,
    minutes=8,
    points=2,
    hints=(
        "The rank's query heads begin at rank * (num_heads // num_ranks).",
        "Query head i reads KV head i // (num_heads // num_kv_heads): take the first and the last query head.",
        "With more ranks than KV heads, num_ranks // num_kv_heads neighbours hold the same one; else a rank is alone.",
    ),
)

projections = Implement(
    "gqa-3",
    "Three weights behind one input",
    "Write `projections_backward(d_queries, d_keys, d_values, x, q, k, v, copies)`: dx, dq, dk and dv.",
    cases=CASES,
    judge=_check_projections,
    right=f"all gradients equal one process in {len(CASES)} cases, with and without copies; no byte too many",
    minutes=12,
    points=3,
    hints=(
        "x was read three times on every rank: add the three parts of dx locally, then sum once over all ranks.",
        "d_keys has what this rank's query heads contribute; others read the same KV head on the ranks of `copies`.",
        "dk = d_keys.T @ x is linear in d_keys: sum dk and dv over `copies`. dx needs nothing more than its sum.",
    ),
)

step = Repair(
    "gqa-4",
    "Copies that go their own ways",
    "Repair a training step after which the copies of a KV head differ.",
    cases=STEPS,
    judge=_check_step,
    right=f"all weights equal one process in {len(STEPS)} cases of 1 to 3 microbatches, and the copies agree",
    minutes=10,
    points=2,
    hints=(
        "Four query heads read one KV head on four ranks. Compare its four copies after a step.",
        "Each copy has the gradient that its own query heads ask for. Who has the others?",
        "All-reduce the gradients of layer.k and layer.v over layer.replicas, once, after the last microbatch; or call "
        "sum_partial_gradients of dualpipe_lab.tp.grads there.",
    ),
)
