"""Layers of experts, for checks: whole numbers on real ranks beside one process, in words."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dualpipe_course.differences import TOLERANCE, apart, difference
from dualpipe_course.exercise import Wrong
from dualpipe_course.trial import on_ranks

if TYPE_CHECKING:
    from torch import Tensor

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
INPUT, OUTPUT = 3, 2  # of the grouped product


def check_backward(
    input_grad: Callable[..., Any], weight_grad: Callable[..., Any], counts: Sequence[int], are_whole: bool
) -> None:
    """Raise `Wrong` unless dx and dW of a grouped product y = x W^T are those of one expert after another.

    Args:
        input_grad: the answer for dx.
        weight_grad: the answer for dW.
        counts: rows of each expert.
        are_whole: data are whole numbers, for which every order of sums is exact; otherwise any float64.
    """
    case = f"rows per expert {list(counts)}" + ("" if are_whole else ", any float64 numbers")
    found, expected, products = on_ranks(_backward, 1, input_grad, weight_grad, list(counts), are_whole, case=case)[0]
    for name, ours, theirs in zip(("dx", "dW"), found, expected, strict=True):
        if ours is None:
            raise Wrong(f"{case}: {name} is not a tensor")
        if ours[0] != theirs[0]:
            raise Wrong(f"{case}: {name} has shape {ours[0]}, needs {theirs[0]}")
        if are_whole and ours[1] != theirs[1]:
            raise Wrong(f"{case}: {name} differs from one expert after another{_where(name, counts, ours, theirs)}")
        if (off := difference(ours[1], theirs[1])) is not None:
            raise Wrong(f"{case}: {name}, number {off.place}, {apart(ours[1][off.place], theirs[1][off.place])}")
    needed = 2 * sum(counts) * INPUT * OUTPUT
    if len(set(counts)) == 1 and products > needed:  # of uneven groups some are padded, perhaps
        raise Wrong(
            f"{case}: both gradients are right, with {products} products of numbers; {needed} will do. A row meets the "
            "matrix of its own expert alone"
        )


def check_layer(fn: Callable[..., Any], num_ranks: int, num_experts: int, tokens: Sequence[int]) -> None:
    """Raise `Wrong` unless every token has the results of its two experts: expert i multiplies by i + 1."""
    case = f"{num_ranks} rank(s), {num_experts} experts, tokens {list(tokens)}"
    results = on_ranks(_layer, num_ranks, fn, num_experts, tokens, case=case)
    for rank, (found, expected, _, _) in enumerate(results):
        if found is None or len(found) != len(expected):
            raise Wrong(f"{case}: rank {rank}: y needs {len(expected)} rows of {HIDDEN} numbers")
        wrong = [token for token, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
        if wrong:
            token = wrong[0]
            raise Wrong(
                f"{case}: rank {rank}: {len(wrong)} of {len(expected)} tokens have other experts' results; token "
                f"{token} has {found[token]}, should have {expected[token]}"
            )
    for rank, (_, _, sent, (leave, come)) in enumerate(results):
        counts = 8 * (num_experts // num_ranks) * (num_ranks - 1)
        needed = counts + 8 * HIDDEN * (leave + come)
        if sent > needed + 8 * leave:  # a row may say for which expert it is
            raise Wrong(
                f"{case}: rank {rank}: all results are right, and it sent {sent} bytes; {needed} will do: {counts} of "
                f"counts, {leave} rows for other ranks' experts, {come} results of others' rows. A row travels to its "
                "experts; no expert travels, nor a row to ranks that it has not chosen"
            )


def check_gradients(fn: Callable[..., Any], ep: int, edp: int) -> None:
    """Raise `Wrong` unless `fn` makes all gradients those of the mean over all tokens."""
    case = f"ep {ep} x edp {edp}"
    for rank, found in enumerate(on_ranks(_gradients, ep * edp, fn, ep, edp, case=case)):
        for name, (ours, theirs) in found.items():
            if ours is None:
                raise Wrong(f"{case}: rank {rank}: the gradient of the {name} is missing")
            errors = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
            if all(error <= TOLERANCE for error in errors):
                continue
            what, off = f"{case}: rank {rank}: the gradient of the {name} ", difference(ours, theirs)
            if off is not None and off.ratio is not None:
                raise Wrong(f"{what}is {off.ratio:.4g} times that of the mean over the tokens of all ranks")
            raise Wrong(f"{what}differs from that of the mean over the tokens of all ranks by up to {max(errors):.2g}")


def _where(name: str, counts: Sequence[int], ours: Any, theirs: Any) -> str:
    if name == "dW":
        size = len(theirs[1]) // len(counts)
        wrong = [e for e in range(len(counts)) if ours[1][e * size : (e + 1) * size] != theirs[1][e * size :][:size]]
        return f", for expert(s) {wrong}"
    return ""


def _draw(seed: int, *shape: int) -> "Tensor":
    import torch

    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).double()


def _plain(value: Any) -> tuple[list[int], list[float]] | None:
    import torch

    if not isinstance(value, torch.Tensor):
        return None
    return list(value.shape), value.detach().flatten().tolist()


def _backward(
    rank: int,
    world_size: int,
    input_grad: Callable[..., Any],
    weight_grad: Callable[..., Any],
    counts: list[int],
    are_whole: bool,
) -> tuple[list[Any], list[Any], int]:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    shapes = (sum(counts), INPUT), (len(counts), OUTPUT, INPUT), (sum(counts), OUTPUT)
    rows, weights, grad = (_draw(seed, *shape) * (1 if are_whole else seed / 7) for seed, shape in enumerate(shapes, 1))
    rows.requires_grad_(), weights.requires_grad_()
    parts = [x @ weight.t() for x, weight in zip(rows.split(counts), weights, strict=True)]
    expected = torch.autograd.grad(torch.cat(parts), (rows, weights), grad)
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        found = [
            input_grad(grad.clone(), weights.detach(), list(counts)),
            weight_grad(grad.clone(), rows.detach(), list(counts)),
        ]
    return [_plain(value) for value in found], [_plain(value) for value in expected], flops.get_total_flops() // 2


def _layer(
    rank: int, world_size: int, fn: Callable[..., Any], num_experts: int, tokens: Sequence[int]
) -> tuple[list[list[float]] | None, list[list[float]], int, tuple[int, int]]:
    import torch

    from dualpipe_lab.world.context import rank_context

    chosen = [_chosen(other, num_experts, number) for other, number in enumerate(tokens)]
    experts = chosen[rank]
    x = _draw(rank, tokens[rank], HIDDEN) + 100.0 * (rank + 1)
    share = num_experts // world_size
    factors = torch.arange(rank * share, (rank + 1) * share).double() + 1
    weights = factors.view(-1, 1, 1) * torch.eye(HIDDEN, dtype=torch.float64)
    ranks_of = [slots.flatten() // share for slots in chosen]
    come = sum(int((ranks == rank).sum()) for other, ranks in enumerate(ranks_of) if other != rank)
    y = fn(x.clone(), experts.clone(), weights, num_experts)
    sent = sum(entry.sent for entry in rank_context().ledger.entries.values())
    expected = x * (experts + 1).sum(1, keepdim=True)
    is_right = isinstance(y, torch.Tensor) and y.shape == x.shape
    traffic = int((ranks_of[rank] != rank).sum()), come
    return y.tolist() if is_right else None, expected.tolist(), sent, traffic


def _chosen(rank: int, num_experts: int, num_tokens: int) -> "Tensor":
    import torch

    generator = torch.Generator().manual_seed(rank + 10 * num_experts)
    return torch.rand(num_tokens, num_experts, generator=generator).topk(2).indices


def _gradients(rank: int, world_size: int, fn: Callable[..., Any], ep: int, edp: int) -> dict[str, Any]:
    """A gradient of 1 per token and parameter: the mean is the share of tokens that come by."""
    import torch

    from dualpipe_lab.ep.moe import ExpertParallel
    from dualpipe_lab.topology import Topology
    from dualpipe_lab.world.mesh import Mesh

    setting = ExpertParallel.of(Mesh(Topology([("dp", edp), ("ep", ep)])))
    tokens = [3 + r for r in range(world_size)]  # uneven
    router = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    router.grad = torch.full_like(router, float(tokens[rank]))
    share = EXPERTS // ep
    experts = torch.nn.Parameter(torch.zeros(share, 2, dtype=torch.float64))
    first = rank // ep * ep  # of the ranks whose tokens came here
    own = [(rank % ep) * share + e + 1.0 for e in range(share)]
    experts.grad = torch.tensor(own, dtype=torch.float64).view(-1, 1).repeat(1, 2) * sum(tokens[first : first + ep])
    fn([router], [experts], setting.edp_group, tokens[rank])
    expected = [number for number in own for _ in range(2)]
    return {
        "router": (None if router.grad is None else router.grad.tolist(), [1.0, 1.0]),
        "experts": (None if experts.grad is None else experts.grad.flatten().tolist(), expected),
    }
