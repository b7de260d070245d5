"""From the status of each rank to the causes of a deadlock.

A cycle of waits, a tag that does not match, a rank that never joined a collective, or different collectives.
"""

from collections import deque
from collections.abc import Callable, Mapping

from dualpipe_lab.launch.record.rank_status import Blocked, RankStatus

Statuses = Mapping[int, RankStatus]


def explain(statuses: Statuses, returned: set[int]) -> list[str]:
    """Causes of a deadlock, the most specific first; `returned` are the ranks whose function has returned."""
    stuck = {rank: status.blocked for rank, status in statuses.items() if status.blocked and rank not in returned}
    return [
        *(_mismatched_collectives(stuck) or _recorded_mismatches(statuses)),
        *_missing_members(stuck, statuses, returned),
        *_cycle(stuck, statuses, returned),
        *_unsent_messages(stuck, statuses, returned),
        *_unreceived_messages(stuck, returned),
    ]


def locate(status: RankStatus, name_line: Callable[[RankStatus], str]) -> str:
    """`rank 0: waits for recv from rank 3 tag 9 shape (4,), 3.0 s, after 6 operations; at Cell In[3], line 8, in f`."""
    line = name_line(status)
    at = f"; at {line}" if line else ""
    if status.blocked is None:
        return f"rank {status.rank}: is not in communication, after {status.completed} operations{at}"
    waited = f", {status.waited_seconds:.1f} s" if status.waited_seconds else ""
    return f"rank {status.rank}: waits for {status.blocked.text}{waited}, after {status.completed} operations{at}"


def is_stuck(before: Statuses, after: Statuses, seconds: float) -> bool:
    """Whether every rank waits for the same operation in both rounds and used almost no processor time between them.

    A rank that moves a large tensor also waits for one operation, but uses processor time.  A collective that all its
    ranks have reached is no deadlock: on a crowded machine it may stand still for seconds.
    """
    if any(_has_all_ranks(status.blocked, after) for status in after.values()):
        return False
    return bool(after) and all(_stood_still(before.get(rank), status, seconds) for rank, status in after.items())


def _has_all_ranks(blocked: Blocked | None, statuses: Statuses) -> bool:
    if blocked is None or blocked.communicator is None:
        return False
    return all(rank in statuses and statuses[rank].blocked == blocked for rank in blocked.communicator.ranks)


def _stood_still(before: RankStatus | None, after: RankStatus, seconds: float) -> bool:
    return (
        before is not None
        and after.blocked is not None
        and not after.in_flight
        and (before.blocked, before.completed) == (after.blocked, after.completed)
        and after.cpu_seconds - before.cpu_seconds < 0.02 * seconds
    )


def disagreements(statuses: Statuses) -> dict[int, str]:
    """Ranks whose collectives differ from those of the first rank of the group, with a sentence on the difference."""
    found: dict[int, str] = {}
    for rank, status in statuses.items():
        for communicator, names in status.history.items():
            first = communicator.ranks[0]
            reference = statuses[first].history.get(communicator, []) if first in statuses else []
            for position, (name, expected) in enumerate(zip(names, reference, strict=False)):
                if name != expected and rank not in found:
                    found[rank] = (
                        f"called {name} as collective {position} of ranks {list(communicator.ranks)}, "
                        f"where rank {first} called {expected}"
                    )
    return found


def _mismatched_collectives(stuck: dict[int, Blocked]) -> list[str]:
    names: dict[str, list[int]] = {}
    for rank, blocked in stuck.items():
        if blocked.sends is None:
            names.setdefault(blocked.name, []).append(rank)
    if len(names) < 2:
        return []
    return ["collective mismatch: " + ", ".join(f"{_ranks(ranks)} in {name}" for name, ranks in names.items())]


def _recorded_mismatches(statuses: Statuses) -> list[str]:
    return [f"collective mismatch: rank {rank} {how}" for rank, how in disagreements(statuses).items()]


def _missing_members(stuck: dict[int, Blocked], statuses: Statuses, returned: set[int]) -> list[str]:
    lines: dict[str, None] = {}
    for blocked in stuck.values():
        if blocked.sends is None:
            missing = _not_joined(blocked, stuck, statuses)
            gone = [rank for rank in missing if rank in returned]
            if missing:
                lines[f"{blocked.name}: {_ranks(missing)} never joined"] = None
            if gone:
                lines[f"{_ranks(gone)} returned without it"] = None
    return list(lines)


def _not_joined(blocked: Blocked, stuck: dict[int, Blocked], statuses: Statuses) -> list[int]:
    """Members of the collective's group that have not begun it; by name if it bypassed `comm`."""
    if blocked.communicator is not None:
        return [
            rank
            for rank in blocked.communicator.ranks
            if rank in statuses and statuses[rank].joined.get(blocked.communicator, 0) <= blocked.sequence
        ]
    return [rank for rank in statuses if rank not in stuck or stuck[rank].name != blocked.name]


def _cycle(stuck: dict[int, Blocked], statuses: Statuses, returned: set[int]) -> list[str]:
    waits: dict[int, list[int]] = {}
    for rank, blocked in stuck.items():
        if blocked.sends is None:
            waits[rank] = [other for other in _not_joined(blocked, stuck, statuses) if other != rank]
        elif blocked.peer is not None:
            waits[rank] = [blocked.peer]
    cycles = [cycle for start in waits if (cycle := _shortest_cycle(waits, start))]
    if not cycles:
        return []
    path = min(cycles, key=len)
    return ["deadlock: " + " -> ".join(f"rank {rank}" for rank in path) + " (each waits for the next)"]


def _shortest_cycle(waits: dict[int, list[int]], start: int) -> list[int] | None:
    paths = deque([[start]])
    seen = {start}
    while paths:
        path = paths.popleft()
        for following in waits.get(path[-1], []):
            if following == start:
                return [*path, start]
            if following not in seen:
                seen.add(following)
                paths.append([*path, following])
    return None


def _unsent_messages(stuck: dict[int, Blocked], statuses: Statuses, returned: set[int]) -> list[str]:
    lines = []
    for rank, blocked in stuck.items():
        peer = blocked.peer
        if blocked.sends is not False or peer is None or peer not in statuses:
            continue
        offered = {
            tag: count - statuses[rank].received[peer, tag]
            for (target, tag), count in statuses[peer].sent.items()
            if target == rank and count > statuses[rank].received[peer, tag]
        }
        if blocked.tag in offered:
            continue
        if offered:
            tags = ", ".join(map(str, sorted(offered)))
            lines.append(
                f"tag mismatch? rank {rank} waits for tag {blocked.tag} from rank {peer}, "
                f"whose unreceived sends to it have tag {tags}"
            )
        elif peer in returned:
            lines.append(f"rank {peer} returned and sent rank {rank} nothing more")
        else:
            lines.append(f"rank {peer} has no send to rank {rank} in flight")
    return lines


def _unreceived_messages(stuck: dict[int, Blocked], returned: set[int]) -> list[str]:
    return [
        f"rank {blocked.peer} returned without receiving what rank {rank} sends with tag {blocked.tag}"
        for rank, blocked in stuck.items()
        if blocked.sends and blocked.peer in returned
    ]


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"
