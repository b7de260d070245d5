"""Exercises of "Sparse mixture of experts": the part `moe`, a missing sort.

Chapter: book/ep/smoe.  The part is judged beside one process that has all tokens and experts, the other two with whole
numbers: sums are exact in any order.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off, compare_on_ranks, in_words
from dualpipe_course.declared import Repair
from dualpipe_course.meter import Meter
from dualpipe_course.own.part import OnRanks, Part
from dualpipe_course.start.ranks import all_waited_for
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from torch import Tensor


HIDDEN = 8
SIZE, WIDTH = 4, 5  # of a token, of an expert
# ranks, the group, experts, choices of a token, tokens of each rank of the group, experts that are chosen
LAYERS: tuple[tuple[int, list[int], int, int, tuple[int, ...], list[int]], ...] = (
    (1, [0], 2, 1, (3,), [0, 1]),
    (2, [0, 1], 2, 2, (3, 2), [0, 1]),
    (2, [0, 1], 4, 2, (3, 2), [0, 1, 2, 3]),
    (2, [1, 0], 4, 2, (4, 3), [0, 1, 3]),
    (2, [0, 1], 4, 2, (4, 0), [0, 1, 2, 3]),
    (2, [0, 1], 4, 2, (2, 3), [2, 3]),
    (4, [3, 1], 6, 3, (2, 4), [0, 1, 2, 4, 5]),
    (4, [0, 1, 2, 3], 8, 2, (3, 0, 1, 4), [0, 1, 2, 3, 4, 6]),
)
NAMES = ("gates", "ups", "downs")
# ranks, experts, tokens of each rank
ROUTINGS: tuple[tuple[int, int, tuple[int, ...]], ...] = (
    (1, 4, (5,)),
    (2, 2, (3, 2)),
    (2, 4, (3, 2)),
    (2, 8, (6, 5)),
    (3, 6, (4, 0, 3)),
)


def _mixture(
    rank: int, world_size: int, ranks: list[int], num_experts: int, k: int, tokens: Sequence[int], among: list[int]
) -> Found:
    """The layer, its gradients and bytes; then its four functions one by one, as the pair calls them."""
    import torch
    from mine.moe import moe, plan

    costs = dict.fromkeys(("forward", "backward", "between"), 0)
    if rank not in ranks:
        return Found({}, costs=costs)
    me = ranks.index(rank)
    x, chosen, weights, dy = _tokens(me, tokens, k, among)
    experts = _experts_of(me, len(ranks), num_experts)
    meter = Meter()
    y = moe(x.requires_grad_(), chosen, weights.requires_grad_(), experts, num_experts, ranks)
    costs["forward"] = meter.lap().bytes
    if y.shape != x.shape:
        raise ValueError(f"y has shape {list(y.shape)}, as x it is {list(x.shape)}")
    meter.lap()
    y.backward(dy)
    all_waited_for()
    costs["backward"] = meter.lap().bytes
    refused = _none_is_missing(experts, me * len(experts))
    found = {"y": y, "dx": x.grad, "the gradient of the weights": weights.grad}
    found |= {name: _stacked(leaves) for name, leaves in zip(NAMES, zip(*experts, strict=True), strict=True)}

    note = plan(chosen, num_experts, ranks)
    if not all(type(n) is int for of in (note.sends, note.receives) for n in of):
        raise TypeError("plan: sends and receives are lists of int, a number for each rank of the group")
    found |= {name: torch.tensor(getattr(note, name)) for name in ("sends", "receives")}
    experts = _experts_of(me, len(ranks), num_experts)
    again, costs["between"] = _one_by_one(x.detach(), weights.detach(), note, experts, ranks)
    if any(leaf.grad is not None for leaves in experts for leaf in leaves):
        words = "a backward has added to a weight, and `later` had put off all of them: products of weights are linear"
        refused = refused or f"compute: {words} of column"
    found |= {"y, put together from the four functions,": again}
    slips = {words: Numbers.of(of[me]) for words, of in _typical(len(ranks), num_experts, tokens, k, among).items()}
    values = {name: Numbers.of(value) for name, value in found.items()}
    return Found(values, slips={"y": slips}, costs=costs, refused=refused)  # others have gone on


def _one_by_one(
    x: "Tensor", weights: "Tensor", note: Any, experts: "list[tuple[Tensor, ...]]", ranks: list[int]
) -> "tuple[Tensor, int]":
    """Each function on leaves of its own, with its backward, while products of weights are put off; bytes it sent."""
    from mine import column
    from mine.exchange import Exchange
    from mine.moe import compute, rows_of, sum_of

    before, column.HOOKS["weight_grad"] = column.HOOKS["weight_grad"], lambda *_: None
    sent = 0

    def alone(f: Callable[..., Any], rows: "Tensor", *rest: Any) -> "Tensor":
        nonlocal sent
        meter = Meter()
        out: Tensor = f(rows.detach().clone().requires_grad_(), *rest)
        if out.requires_grad:
            out.backward(out.detach())
        sent += meter.lap().bytes
        return out.detach()

    try:
        rows = Exchange.apply(alone(rows_of, x, note), note.sends, note.receives, ranks)
        rows = Exchange.apply(alone(compute, rows, note, experts), note.receives, note.sends, ranks)
        return alone(sum_of, rows, weights, note), sent
    finally:
        column.HOOKS["weight_grad"] = before


def _none_is_missing(experts: "list[tuple[Tensor, ...]]", first: int) -> str:
    for number, leaves in enumerate(experts, first):
        if any(leaf.grad is None for leaf in leaves):
            return (
                f"expert {number} has the gradient None. An expert to which no row came has gradients of zeros: run "
                "its products without rows, too, because ranks with a copy of it add theirs"
            )
    return ""


def _one_process(
    rank: int, world_size: int, ranks: list[int], num_experts: int, k: int, tokens: Sequence[int], among: list[int]
) -> "dict[str, Tensor | None]":
    """All tokens meet all experts, and the router's weights, 0 for most, choose."""
    import torch

    num, here = len(ranks), num_experts // len(ranks)
    of_ranks = [_tokens(r, tokens, k, among) for r in range(num)]
    x, weights = (torch.cat([one[i] for one in of_ranks]).requires_grad_() for i in (0, 2))
    chosen, dy = (torch.cat([one[i] for one in of_ranks]) for i in (1, 3))
    experts = [leaves for r in range(num) for leaves in _experts_of(r, num, num_experts)]
    gates, ups, downs = (torch.stack([leaves[i].detach() for leaves in experts]).requires_grad_() for i in range(3))
    made = torch.einsum("edw,tew->ted", downs, _hidden(x, gates, ups))
    full = x.new_zeros(len(x), num_experts).scatter(1, chosen, weights)
    y = torch.einsum("te,ted->td", full, made)
    y.backward(dy)
    names = ("y", "dx", "the gradient of the weights", *NAMES)
    if rank not in ranks:
        return dict.fromkeys((*names, "sends", "receives", "y, put together from the four functions,"))
    me = ranks.index(rank)
    own = [one.split(list(tokens))[me] for one in (y.detach(), x.grad, weights.grad) if one is not None]
    own += [one.grad[me * here : me * here + here] for one in (gates, ups, downs) if one.grad is not None]
    table = torch.stack([(one[1].flatten() // here).bincount(minlength=num) for one in of_ranks])
    return dict(zip(names, own, strict=True)) | {
        "sends": table[me],
        "receives": table[:, me],
        "y, put together from the four functions,": own[0],
    }


def _typical(num: int, num_experts: int, tokens: Sequence[int], k: int, among: list[int]) -> "dict[str, list[Tensor]]":
    """What y of each rank is if rows meet experts in the order of arrival, go back by expert, or take other weights."""
    import torch

    here = num_experts // num
    of_ranks = [_tokens(r, tokens, k, among) for r in range(num)]
    gates, ups, downs = (
        torch.stack([leaves[i].detach() for r in range(num) for leaves in _experts_of(r, num, num_experts)])
        for i in range(3)
    )
    made = [torch.einsum("edw,tew->ted", downs, _hidden(one[0], gates, ups)) for one in of_ranks]
    unsorted, by_expert, other = ([torch.zeros_like(one[0]) for one in of_ranks] for _ in range(3))
    for rank in range(num):
        arrived = []
        for r, (_, chosen, weights, _) in enumerate(of_ranks):
            slots = sorted(range(chosen.numel()), key=chosen.flatten().tolist().__getitem__)
            for place, slot in enumerate(slots):
                token, j = divmod(slot, k)
                expert = int(chosen[token, j])
                if expert // here == rank:
                    arrived.append((r, token, float(weights[token, j]), expert))
                    other[r][token] += weights.flatten()[place] * made[r][token, expert]
        in_order = sorted(arrived, key=lambda row: row[3])
        for (r, token, weight, _), (of, whose, _, expert) in zip(arrived, in_order, strict=True):
            unsorted[r][token] += weight * made[r][token, expert]
            by_expert[r][token] += weight * made[of][whose, expert]
    return {
        "rows met experts in the order of their arrival. They arrive by rank, and of each rank by expert: the rows of "
        "one expert do not lie together": unsorted,
        "results went back in the order of experts; compute returns them in the order in which rows came": by_expert,
        "results come back by expert, and the weights lie by token: sum_of needs the same order for both": other,
    }


def _tokens(me: int, tokens: Sequence[int], k: int, among: list[int]) -> "tuple[Tensor, Tensor, Tensor, Tensor]":
    """Tokens of a rank, their experts and weights, and the gradient of the output."""
    import torch

    generator = torch.Generator().manual_seed(100 * len(tokens) + me)
    x, dy = (torch.randn(tokens[me], SIZE, dtype=torch.float64, generator=generator) for _ in range(2))
    chosen = torch.rand(tokens[me], len(among), generator=generator).topk(k).indices
    weights = torch.rand(tokens[me], k, dtype=torch.float64, generator=generator) + 0.1
    return x, torch.tensor(among)[chosen], weights, dy


def _experts_of(me: int, num: int, num_experts: int) -> "list[tuple[Tensor, Tensor, Tensor]]":
    """Gate, up and down of each expert of a rank: leaves."""
    import torch

    found = []
    for expert in range(me * num_experts // num, (me + 1) * num_experts // num):
        generator = torch.Generator().manual_seed(expert)
        shapes = (WIDTH, SIZE), (WIDTH, SIZE), (SIZE, WIDTH)
        gate, up, down = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
        found.append((gate.requires_grad_(), up.requires_grad_(), down.requires_grad_()))
    return found


def _hidden(x: "Tensor", gates: "Tensor", ups: "Tensor") -> "Tensor":
    """Of every token and expert: (tokens, experts, width)."""
    import torch

    gate, up = (torch.einsum("ewd,td->tew", of, x) for of in (gates, ups))
    return torch.nn.functional.silu(gate) * up


def _stacked(leaves: "Sequence[Tensor]") -> "Tensor":
    import torch

    return torch.stack([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])


def _bytes_of_layer(
    world_size: int, ranks: list[int], num_experts: int, k: int, tokens: Sequence[int], among: list[int]
) -> list[Limit]:
    num, here = len(ranks), num_experts // len(ranks)
    forward, backward = ([0] * world_size for _ in range(2))
    of_ranks = [(_tokens(r, tokens, k, among)[1].flatten() // here).tolist() for r in range(num)]
    for me, rank in enumerate(ranks):
        leave = sum(owner != me for owner in of_ranks[me])
        come = sum(owner == me for r, owners in enumerate(of_ranks) for owner in owners if r != me)
        backward[rank] = 8 * SIZE * (leave + come)
        forward[rank] = backward[rank] + 8 * here * (num - 1) + 8 * leave  # a row may say for which expert it is
    return [
        Limit(
            "forward",
            forward,
            "rank {rank} sent {found} bytes in the forward; {most} are enough for counts, its rows for others' experts "
            "and the results of others' rows. No expert travels, nor a row to ranks that it has not chosen",
            scope="each",
        ),
        Limit(
            "backward",
            backward,
            "rank {rank} sent {found} bytes in the backward; {most} are the gradients of results and of rows. Counts "
            "are known, and the gradients of experts are complete where they are",
            scope="each",
        ),
        Limit(
            "between",
            0,
            "rank {rank} sent {found} bytes in rows_of, compute and sum_of. Messages belong into plan and the two "
            "exchanges: a later part cuts the layer there, and computes meanwhile",
            scope="each",
        ),
    ]


def _why_not_mixed(off: Off) -> str:
    words = in_words(off)
    if off.found is None:
        return f"{words}: no gradient reaches it. Was something detached, or made anew from numbers?"
    if off.slip or off.has_other_shape:
        return words
    if off.name in ("y", "dx"):
        each = (
            "y is the sum of its results, each times its weight" if off.name == "y" else "gradient is that of its rows"
        )
        return f"{words}. A token has a row for each of its choices, and its {each}"
    if off.name in NAMES:
        return f"{words}. An expert's gradient has the rows of all ranks in it: nothing is summed, nothing divided"
    return words


def _check_layer(fn: Callable[..., Any], num_ranks: int, num_experts: int, tokens: Sequence[int]) -> None:
    """Raise `Wrong` unless every token has the results of its two experts: expert i multiplies by i + 1."""
    case = f"{num_ranks} rank(s), {num_experts} experts, tokens {list(tokens)}"
    results = compare_on_ranks(_layer, num_ranks, fn, num_experts, tokens, case=case, why=_tokens_in_words, tolerance=0)
    for rank, found in enumerate(results):
        counts = 8 * (num_experts // num_ranks) * (num_ranks - 1)
        leave, come = (int(found.costs[name]) for name in ("rows that leave", "rows that come"))
        needed, sent = counts + 8 * HIDDEN * (leave + come), results.ledger.sent(rank=rank)
        if sent > needed + 8 * leave:  # a row may say for which expert it is
            raise Wrong(
                f"{case}: rank {rank}: all results are right, and it sent {sent} bytes; {needed} will do: {counts} of "
                f"counts, {leave} rows for other ranks' experts, {come} results of others' rows. A row travels to its "
                "experts; no expert travels, nor a row to ranks that it has not chosen"
            )


def _tokens_in_words(off: Off) -> str:
    if off.found is None or off.has_other_shape:
        return f"y needs {off.expected.shape[0]} rows of {HIDDEN} numbers"
    rows = range(off.expected.shape[0])
    wrong = [token for token in rows if off.found.row(token) != off.expected.row(token)]
    token = wrong[0]
    return (
        f"{len(wrong)} of {len(rows)} tokens have other experts' results; token {token} has {off.found.row(token)}, "
        f"should have {off.expected.row(token)}"
    )


def _draw(seed: int, *shape: int) -> "Tensor":
    import torch

    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).double()


def _layer(rank: int, world_size: int, fn: Callable[..., Any], num_experts: int, tokens: Sequence[int]) -> Found:
    import torch

    chosen = [_chosen(other, num_experts, number) for other, number in enumerate(tokens)]
    experts = chosen[rank]
    x = _draw(rank, tokens[rank], HIDDEN) + 100.0 * (rank + 1)
    share = num_experts // world_size
    factors = torch.arange(rank * share, (rank + 1) * share).double() + 1
    weights = factors.view(-1, 1, 1) * torch.eye(HIDDEN, dtype=torch.float64)
    ranks_of = [slots.flatten() // share for slots in chosen]
    come = sum(int((ranks == rank).sum()) for other, ranks in enumerate(ranks_of) if other != rank)
    y = fn(x.clone(), experts.clone(), weights, num_experts)
    expected = {"y": Numbers.of(x * (experts + 1).sum(1, keepdim=True))}
    leave = int((ranks_of[rank] != rank).sum())
    return Found({"y": Numbers.of(y)}, expected, costs={"rows that leave": leave, "rows that come": come})


def _chosen(rank: int, num_experts: int, num_tokens: int) -> "Tensor":
    import torch

    generator = torch.Generator().manual_seed(rank + 10 * num_experts)
    return torch.rand(num_tokens, num_experts, generator=generator).topk(2).indices


moe = Part(
    "smoe-5",
    "moe",
    "A layer of experts",
    "Write plan, rows_of, compute and sum_of, and moe, which puts them together with two exchanges.",
    names=("plan", "rows_of", "compute", "sum_of", "moe"),
    trials=(
        OnRanks(
            _mixture,
            LAYERS,
            _one_process,
            "group {1} of {0} rank(s), {2} experts, {3} per token, tokens {4}, experts {5} are chosen",
            _bytes_of_layer,
            _why_not_mixed,
        ),
    ),
    right=f"outputs and all gradients of {len(LAYERS)} layers, up to 3 experts a rank, some without tokens or rows",
    minutes=90,
    points=5,
    hints=(
        "A choice is a row: of T tokens with k choices, row t * k + j. order = chosen.flatten().argsort(stable=True) "
        "sorts them by expert, and so by rank; x[order // k] are the rows to send.",
        "counts = bincount(chosen.flatten(), minlength=E): each rank gets the counts of its E / N experts from every "
        "rank, by start_exchange with tag 0. The arriving rows lie by rank, then by expert: "
        "torch.arange(here).repeat(N).repeat_interleave(arrived) says for which expert each one is.",
        "compute: for each expert its rows, linear(silu(linear(rows, gate)) * linear(rows, up), down), also without "
        "rows; torch.cat of all, put back by the argsort of their places. sum_of: rows times weights.flatten()[order], "
        "added by index_add at the tokens order // k, into zeros of (T, size).",
    ),
)

regrouped = Repair(
    "smoe-3",
    "Right with one expert per rank",
    "Repair a layer that is right with one expert per rank.",
    cases=ROUTINGS,
    judge=_check_layer,
    right=f"every token has its experts' results in {len(ROUTINGS)} cases, up to 4 experts per rank",
    minutes=10,
    points=2,
    trail=True,
    hints=(
        "On one rank with four experts it is right, on four ranks with four experts too. Print counts on two ranks.",
        "Rows arrive source by source, and each source's rows are sorted by expert. What do counts say about them?",
        "A second stable argsort, of the experts of the arriving rows, before the product; its inverse after it.",
    ),
)
