"""Exercises of "Sparse mixture of experts": rows by hand, I and W of weighted rows, a missing sort, a wrong divisor.

Chapter: book/ep/smoe.  Judged with whole numbers against one process: sums are exact in any order.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off, compare_on_ranks
from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.differences import TOLERANCE, apart
from dualpipe_course.switched_off import AUTOGRAD, Without
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from torch import Tensor


NAMES = ("rows for expert 0", "rows for expert 1", "place on arrival", "place after regroup", "bytes forward")
_SLIPS = (
    {2: "those are rank 0's own; rank 1's tokens choose expert 0 too", 3: "those come from rank 1 alone"},
    {1: "that is rank 0's own; rank 1's tokens choose expert 1 too", 2: "those come from rank 1 alone"},
    {5: "that is its place after the regroup; on arrival its own rank's rows lie together", 3: "places begin with 0"},
    {2: "that is its place on arrival; all rows of expert 0 come before it now", 6: "places begin with 0"},
    {
        160: "that is the dispatch; the combine sends the results of others' rows home",
        256: "the dispatch sends the slots for rank 1's experts alone, a row each of 32 bytes",
        512: "slots for its own experts do not travel",
        640: "that is the backward as well",
    },
)
GROUPS: tuple[tuple[int, ...], ...] = ((2,), (1, 2), (2, 0, 3), (0, 0, 2, 1), (0, 0), (2, 2, 2))
HIDDEN = 8
# ranks, experts, tokens of each rank
ROUTINGS: tuple[tuple[int, int, tuple[int, ...]], ...] = (
    (1, 4, (5,)),
    (2, 2, (3, 2)),
    (2, 4, (3, 2)),
    (2, 8, (6, 5)),
    (3, 6, (4, 0, 3)),
)
# ep, edp
GRIDS: tuple[tuple[int, int], ...] = ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1))
EXPERTS = 4
INPUT, OUTPUT = 4, 3  # of the grouped product


def _check_backward(
    input_grad: Callable[..., Any], weight_grad: Callable[..., Any], counts: Sequence[int], are_whole: bool
) -> None:
    """Raise `Wrong` unless dh, dw and dW of y = w (h W^T) are those of one expert after another.

    Args:
        input_grad: the answer for dh and dw.
        weight_grad: the answer for dW.
        counts: rows of each expert.
        are_whole: data are whole numbers, for which every order of sums is exact; otherwise any float64.
    """
    needed = 2 * sum(counts) * INPUT * OUTPUT
    spare = sum(counts) * (INPUT + OUTPUT)  # an inner product may be a matrix product
    words = (
        "all gradients are right, with {found} products of numbers; "
        f"{needed} will do. A row meets the matrix of its own expert alone, and once: W h is not made again"
    )
    is_even = len(set(counts)) == 1  # of uneven groups some are padded, perhaps
    compare_on_ranks(
        _backward,
        1,
        input_grad,
        weight_grad,
        list(counts),
        are_whole,
        case=f"rows per expert {list(counts)}" + ("" if are_whole else ", any float64 numbers"),
        at=": ",
        why=lambda off: _product_in_words(off, counts, are_whole),
        limits=[Limit("products", needed + spare, words)] if is_even else [],
        tolerance=0 if are_whole else TOLERANCE,
    )


def _product_in_words(off: Off, counts: Sequence[int], are_whole: bool) -> str:
    if off.found is None:
        return f"{off.name} is not a tensor"
    if off.has_other_shape:
        return f"{off.name} has shape {list(off.found.shape)}, needs {list(off.expected.shape)}"
    if off.slip:
        return f"{off.name}: {off.slip}"
    if not are_whole:
        both = apart(off.found.flat[off.place], off.expected.flat[off.place])
        return f"{off.name}, number {off.place}, {both}"
    of = ""
    if off.name == "dW":
        wrong = [expert for expert in range(len(counts)) if off.found.row(expert) != off.expected.row(expert)]
        of = f", for expert(s) {wrong}"
    return f"{off.name} differs from one expert after another{of}"


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


def _check_gradients(fn: Callable[..., Any], ep: int, edp: int) -> None:
    """Raise `Wrong` unless `fn` makes all gradients those of the mean over all tokens."""
    compare_on_ranks(
        _gradients, ep * edp, fn, ep, edp, case=f"ep {ep} x edp {edp}", at=": rank {rank}: the gradient of the "
    )


def _draw(seed: int, *shape: int) -> "Tensor":
    import torch

    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).double()


def _backward(
    rank: int,
    world_size: int,
    input_grad: Callable[..., Any],
    weight_grad: Callable[..., Any],
    counts: list[int],
    are_whole: bool,
) -> Found:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    shapes = (sum(counts), INPUT), (sum(counts),), (len(counts), OUTPUT, INPUT), (sum(counts), OUTPUT)
    given = [_draw(seed, *shape) * (1 if are_whole else seed / 7) for seed, shape in enumerate(shapes, 1)]
    given[1][:1] = 0  # who divides by a weight is found out
    h, w, weights, grad = (value.requires_grad_(number < 3) for number, value in enumerate(given))
    parts = [rows @ weight.t() for rows, weight in zip(h.split(counts), weights, strict=True)]
    out = torch.cat(parts)
    expected = torch.autograd.grad(w[:, None] * out, (h, w, weights), grad)
    h, w, weights = (value.detach() for value in (h, w, weights))
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        by_row = input_grad(grad.clone(), h.clone(), w.clone(), weights.clone(), list(counts))
        by_weight = weight_grad(grad.clone(), h.clone(), w.clone(), list(counts))
    if not isinstance(by_row, (tuple, list)) or len(by_row) != 2:
        return Found({}, refused="input_grad returns two tensors, dh and dw")
    names = "dh", "dw", "dW"
    slip = "that times the weight; y has the weight as a factor, and its derivative has it no more"
    return Found(
        {name: Numbers.of(value) for name, value in zip(names, (*by_row, by_weight), strict=True)},
        {name: Numbers.of(value) for name, value in zip(names, expected, strict=True)},
        {"dw": {slip: Numbers.of(w * expected[1])}},
        costs={"products": flops.get_total_flops() // 2},
    )


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


def _gradients(rank: int, world_size: int, fn: Callable[..., Any], ep: int, edp: int) -> Found:
    """A gradient of 1 per token and parameter: the mean is the share of tokens that come by."""
    import torch

    from dualpipe_lab.ep.moe import ExpertParallel
    from dualpipe_lab.launch.mesh import Mesh
    from dualpipe_lab.topology import Topology

    setting = ExpertParallel.of(Mesh(Topology([("dp", edp), ("ep", ep)])))
    tokens = (3, 4, 5, 0)[:world_size]  # the last of four ranks has none
    router = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    router.grad = torch.full_like(router, float(tokens[rank]))
    share = EXPERTS // ep
    experts = torch.nn.Parameter(torch.zeros(share, 2, dtype=torch.float64))
    first = rank // ep * ep  # of the ranks whose tokens came here
    own = [(rank % ep) * share + e + 1.0 for e in range(share)]
    experts.grad = torch.tensor(own, dtype=torch.float64).view(-1, 1).repeat(1, 2) * sum(tokens[first : first + ep])
    fn([router], [experts], setting.edp_group, tokens[rank])
    expected = {"router": torch.ones(2), "experts": torch.tensor(own).view(-1, 1).repeat(1, 2)}
    found = {"router": router.grad, "experts": experts.grad}
    values, right = ({name: Numbers.of(value) for name, value in of.items()} for of in (found, expected))
    return Found(values, right)


def _judge_backward(input_grad: Callable[..., Any], weight_grad: Callable[..., Any]) -> str:
    library = [f"dualpipe_lab.ep.moe.experts:{name}" for name in ("grouped_product", "grouped_weight_grad")]
    by_rows, by_weights = (Without(fn, *library, *AUTOGRAD) for fn in (input_grad, weight_grad))
    for counts in GROUPS:
        for are_whole in (True, False):
            _check_backward(by_rows, by_weights, counts, are_whole)
    return f"three gradients are right for {len(GROUPS)} groupings, from two products per row"


numbers = Predict(
    "smoe-1",
    "Eight tokens on two ranks",
    NAMES,
    lambda: (5, 3, 2, 5, 320),
    minutes=5,
    points=1,
    trail=True,
    hints=(
        "Write the 8 slots of each rank with their experts, and sort them by expert, earlier slots first.",
        "Rank 0 receives its own slots for experts 0 and 1 first, then those of rank 1, each part sorted by expert.",
        "Bytes: 5 slots of rank 0 are for rank 1, and 5 rows of rank 1 were worked on here. A row has 32 bytes.",
    ),
    slips=_SLIPS,
)

backward = Implement(
    "smoe-2",
    "The weight travels with the row",
    "Write `input_grad` and `weight_grad` of a grouped product with a weight per row, without its output.",
    judge=_judge_backward,
    minutes=15,
    points=3,
    hints=(
        "Write dh of one row on paper, then dw: both have the row of grad and the matrix of the expert in them.",
        "dw_r is the inner product of grad_r with W h_r. An inner product allows the matrix on the other side.",
        "For dW a weight is a factor of the row h_r. An expert without rows has a matrix of zeros: a product of "
        "[out, 0] and [0, in] is one.",
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

scaled = Repair(
    "smoe-4",
    "A factor that depends on the grid",
    "Repair the sum of gradients of a layer whose experts have copies.",
    cases=GRIDS,
    judge=_check_gradients,
    right=f"all gradients are those of the mean over all tokens on {len(GRIDS)} grids",
    minutes=10,
    points=2,
    hints=(
        "Whose tokens are in an expert's gradient before anything is summed?",
        "The router's gradients are right: a sum over all ranks, divided by the tokens of all ranks.",
        "Experts: a sum over the copies, divided by the tokens of all ranks, as the router's. No average.",
    ),
)
