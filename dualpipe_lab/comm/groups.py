"""Process groups: making one, its ranks, and the position of this rank in it.

Chapter: book/start/ranks-and-messages.  In: global ranks.  Out: a process group of torch.
Elsewhere: `torch.distributed.new_group`, `get_rank`, `get_world_size`.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch.distributed as dist

from dualpipe_lab.launch.context import rank_context
from dualpipe_lab.launch.record.operation import Operation
from dualpipe_lab.launch.record.wire import KINDS, MESSAGES

Group: TypeAlias = dist.ProcessGroup


def members(group: Group | None) -> tuple[int, ...]:
    """Global ranks of a group, in group order.

    Raises:
        ValueError: this rank is not in the group.
        TypeError: this is no process group.
    """
    context = rank_context()
    if group is None:
        return context.everyone
    check_group(group)
    rank = context.rank
    ranks = () if group is dist.GroupMember.NON_GROUP_MEMBER else tuple(dist.get_process_group_ranks(group))
    if rank not in ranks:
        raise ValueError(f"rank {rank} is not in the group {ranks or '(of other ranks)'}; only its members call it")
    return ranks


def check_group(group: Any) -> None:
    """Raise TypeError for something else than a process group, such as a layer's options that have one."""
    if not isinstance(group, dist.ProcessGroup) and group is not dist.GroupMember.NON_GROUP_MEMBER:
        kind = type(group).__name__
        remedy = "its .group" if hasattr(group, "group") else "None for the world, or mesh.group(axis)"
        if isinstance(group, int | str):
            remedy = f"a group of the mesh, and {group!r} by the name of its argument"
        raise TypeError(f"a collective takes a process group, got {kind}; give {remedy}")


def name_of(group: Group | None) -> str:
    """Torch's name of a group, the same on all its members; empty for the world."""
    return "" if group is None or group is dist.group.WORLD else str(group.group_name)


def carrier(name: str, ranks: tuple[int, ...], group_name: str, group: Group | None) -> Group | None:
    """Process group that carries an operation of `group`: one per kind of operation if the wire is counted."""
    wire = rank_context().wire
    kind = name if name in KINDS else MESSAGES
    return group if wire is None else wire.group(kind, ranks, group_name) or group


def new_group(ranks: Sequence[int], members_only: bool = False) -> Group:
    """Make a process group; every rank of the world calls this, for all groups in the same order.

    Torch hangs or connects the wrong ranks if their orders differ; this function compares the ranks first.

    Args:
        ranks: different global ranks, in group order.
        members_only: True if only the ranks of the group call this, in the same order.

    Raises:
        ValueError: `ranks` repeats a rank or has one outside the world, or another rank makes another group.
    """
    context = rank_context()
    world_size = context.world_size
    if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(world_size)):
        raise ValueError(f"a group holds different ranks of 0..{world_size - 1}, got {list(ranks)}")
    if not members_only:  # other ranks do not call it, so there is nothing to compare
        _check_agreed(tuple(ranks))
    limit = context.time_limit
    group: Group = dist.new_group(list(ranks), timeout=limit, use_local_synchronization=members_only)
    if wire := context.wire:
        wire.add(ranks, "" if group is dist.GroupMember.NON_GROUP_MEMBER else name_of(group), members_only)
    return group


def group_of(ranks: Sequence[int]) -> Group:
    """Return the group of these ranks, in rising order; its members call this, and make their groups in one order."""
    context, wanted = rank_context(), tuple(ranks)
    if wanted == context.everyone:
        world: Group = dist.group.WORLD
        return world
    found = next((group for group in context.groups.values() if members(group) == wanted), None)
    if found is None:
        found = context.groups[(wanted,)] = new_group(wanted, members_only=True)
    return found


def _check_agreed(ranks: tuple[int, ...]) -> None:
    context = rank_context()
    made: list[tuple[int, ...]] = [()] * context.world_size
    operation = Operation("new_group", context.everyone, (), label=f"of ranks {list(ranks)}")
    recorder = context.recorder
    recorder.before(operation)
    dist.all_gather_object(made, ranks)
    recorder.status.current, recorder.status.ended = None, operation
    recorder.status.completed += 1
    other = next((rank for rank, theirs in enumerate(made) if theirs != ranks), None)
    if other is not None:
        raise ValueError(
            f"rank {context.rank} makes a group of ranks {list(ranks)} while rank {other} makes one of "
            f"{list(made[other])}; every rank must make all groups, its own or not, in one order"
        )


def get_rank(group: Group | None = None) -> int:
    """Position of this rank in `group`; by default its global rank.

    Raises:
        ValueError: this rank is not in `group`.
    """
    return rank_context().rank if group is None else members(group).index(rank_context().rank)


def get_world_size(group: Group | None = None) -> int:
    """Number of ranks in `group`; by default of the world.

    Raises:
        ValueError: this rank is not in `group`.
    """
    return rank_context().world_size if group is None else len(members(group))
