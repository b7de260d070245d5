"""Sums in two levels for checks: nodes of ranks, whole numbers that come out exactly, bytes inside and out of a node.

In: a function of a tensor, the group of the node and the group across nodes.  Out: nothing, or `Wrong`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpipe_course.differences import close
from dualpipe_course.exercise import Wrong
from dualpipe_course.trial import on_ranks
from dualpipe_lab.topology import Topology
from dualpipe_lab.world.record import traffic

if TYPE_CHECKING:
    from dualpipe_lab.dp.hybrid import NodeBytes

WIDTH = 8  # bytes of a number


def check_sum(fn: Callable[..., Any], per_node: int, num_nodes: int, numel: int) -> None:
    """Raise `Wrong` unless x becomes the sum over all ranks, with few bytes out of each node."""
    case = f"{num_nodes} node(s) of {per_node} rank(s), {numel} numbers"
    found = on_ranks(_sum, per_node * num_nodes, fn, per_node, numel, case=case)
    inputs = [_numbers(rank, numel) for rank in range(per_node * num_nodes)]
    expected = [sum(column) for column in zip(*inputs, strict=True)]
    shard = -(-numel // per_node)
    inside = 2 * (per_node - 1) * shard * WIDTH
    for rank, (values, _) in enumerate(found):
        if values != expected:
            raise Wrong(
                f"{case}: rank {rank} has {values}, expected {expected}{_whose(values, inputs, per_node, rank)}"
            )
    _check_bytes([sent for _, sent in found], per_node, num_nodes, shard, inside, case)


def check_mean(fn: Callable[..., Any], per_node: int, num_nodes: int) -> None:
    """Raise `Wrong` unless every rank gets its shard of the mean over all ranks."""
    case = f"{num_nodes} node(s) of {per_node} rank(s)"
    num_ranks, numel = per_node * num_nodes, 2 * per_node
    found = on_ranks(_mean, num_ranks, fn, per_node, numel, case=case)
    columns = zip(*(_numbers(rank, numel) for rank in range(num_ranks)), strict=True)
    mean = [sum(column) / num_ranks for column in columns]
    for rank, (values, _, _) in enumerate(found):
        place = rank % per_node
        expected = mean[2 * place : 2 * place + 2]
        if type(values) is not list or len(values) != 2:
            raise Wrong(f"{case}: rank {rank} returned {values}, expected its shard, 2 of {numel} numbers")
        if not close(values, expected):
            ratio = values[0] / expected[0]
            raise Wrong(f"{case}: rank {rank} has {values}, expected {expected}{_scale(ratio, per_node, num_nodes)}")
    _check_bytes([sent for _, sent, _ in found], per_node, num_nodes, 2, (per_node - 1) * 2 * WIDTH, case)
    for rank, (_, _, has_changed) in enumerate(found):
        if has_changed:
            raise Wrong(f"{case}: rank {rank}: grad has changed; leave it as it is and return a tensor of your own")


def _check_bytes(by_rank: "list[NodeBytes]", per_node: int, num_nodes: int, shard: int, inside: int, case: str) -> None:
    """Raise `Wrong` if more than an all-reduce of one shard leaves a node or, less dear, more than `inside` stays."""
    chunks = [WIDTH * size for size in traffic.split(shard, num_nodes)]
    for rank, sent in enumerate(by_rank):
        between = traffic.all_reduce(chunks, rank // per_node).sent
        if sent.inter > between:
            raise Wrong(
                f"{case}: rank {rank} sent {sent.inter} bytes to other nodes, {between} are enough: "
                f"first sum inside the node, so that each rank has a shard of {shard} number(s) left to sum across"
            )
    for rank, sent in enumerate(by_rank):
        if sent.intra > inside:
            raise Wrong(
                f"{case}: rank {rank} sent {sent.intra} bytes inside its node, {inside} are enough: "
                "one shard to each neighbour"
            )


def _numbers(rank: int, numel: int) -> list[int]:
    """Every rank has other numbers, no mean of which is 0."""
    return [(rank + 2) * 10 ** (rank % 5) + place * (rank + 1) for place in range(numel)]


def _whose(values: object, inputs: list[list[int]], per_node: int, rank: int) -> str:
    node = rank // per_node
    own = inputs[node * per_node : (node + 1) * per_node]
    if values == [sum(column) for column in zip(*own, strict=True)]:
        return "; this is the sum over its own node"
    if values == inputs[rank]:
        return "; x has not changed, and the sum belongs into x itself"
    return ""


def _scale(ratio: float, per_node: int, num_nodes: int) -> str:
    if abs(ratio * num_nodes - 1) < 1e-9:
        return (
            f"; 1/{num_nodes} of it: the nodes are divided by twice, and Adam, which ignores the scale, would hide it"
        )
    if abs(ratio - num_nodes * per_node) < 1e-9:
        return "; this is the sum"
    if abs(ratio - num_nodes) < 1e-9 or abs(ratio - per_node) < 1e-9:
        return f"; {ratio:.0f} times too large: divide by the ranks of all nodes"
    return ""


def _groups(per_node: int) -> Any:
    from dualpipe_lab.world.context import rank_context
    from dualpipe_lab.world.mesh import Mesh

    topology = Topology([("dp", rank_context().world_size)], ranks_per_node=per_node)
    mesh = Mesh(topology)
    return topology, mesh.group("shard"), mesh.group("replica")


def _sum(
    rank: int, world_size: int, fn: Callable[..., Any], per_node: int, numel: int
) -> "tuple[list[int], NodeBytes]":
    import torch

    from dualpipe_lab.dp.hybrid import count_by_node

    topology, node, across = _groups(per_node)
    ledger, x = count_by_node(topology), torch.tensor(_numbers(rank, numel))
    fn(x, node, across)
    return x.tolist(), ledger.total()


def _mean(
    rank: int, world_size: int, fn: Callable[..., Any], per_node: int, numel: int
) -> tuple[object, "NodeBytes", bool]:
    import torch

    from dualpipe_lab.dp.hybrid import count_by_node

    topology, node, across = _groups(per_node)
    ledger, grad = count_by_node(topology), torch.tensor(_numbers(rank, numel), dtype=torch.float64)
    before = grad.clone()
    shard = fn(grad, node, across)
    has_changed = not torch.equal(grad, before)
    return shard.tolist() if isinstance(shard, torch.Tensor) else shard, ledger.total(), has_changed
