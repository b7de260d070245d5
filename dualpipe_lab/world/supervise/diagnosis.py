"""Why nothing moves: each rank's answer turned into who waits for whom.

Chapter: book/start/ranks-and-messages.  In: the whereabouts of the ranks, None for one that cannot answer.
Out: lines of text: first where each rank is, then the cause (a cycle of waits, a tag that does not match, a rank that
never joined, different collectives).
"""

from collections import deque
from collections.abc import Callable, Mapping

from dualpipe_lab.world.record.rank_status import Blocked, RankStatus

Answers = Mapping[int, RankStatus]


def explain(answers: Answers, returned: set[int]) -> list[str]:
    """Every cause that the answers show, most specific first."""
    stuck = {rank: answer.blocked for rank, answer in answers.items() if answer.blocked and rank not in returned}
    return [
        *(_mismatched_collectives(stuck) or _recorded_mismatches(answers)),
        *_missing_members(stuck, answers, returned),
        *_cycle(stuck, answers, returned),
        *_unsent_messages(stuck, answers, returned),
        *_unreceived_messages(stuck, returned),
    ]


def locate(answer: RankStatus, name_place: Callable[[RankStatus], str]) -> str:
    """`rank 0: waits for recv from rank 3 tag 9 shape (4,), 3.0 s, after 6 operations; at Cell In[3], line 8, in f`."""
    place = name_place(answer)
    at = f"; at {place}" if place else ""
    if answer.blocked is None:
        return f"rank {answer.rank}: is not in communication, after {answer.completed} operations{at}"
    waited = f", {answer.waited_seconds:.1f} s" if answer.waited_seconds else ""
    return f"rank {answer.rank}: waits for {answer.blocked.text}{waited}, after {answer.completed} operations{at}"


def is_stuck(before: Answers, after: Answers, seconds: float) -> bool:
    """Whether every rank waits for the same thing in both rounds without using its processor.

    A rank that is moving a large tensor also waits for the same operation, but that costs processor time.
    """
    return bool(after) and all(_stood_still(before.get(rank), answer, seconds) for rank, answer in after.items())


def _stood_still(before: RankStatus | None, after: RankStatus, seconds: float) -> bool:
    return (
        before is not None
        and after.blocked is not None
        and not after.in_flight
        and (before.blocked, before.completed) == (after.blocked, after.completed)
        and after.cpu_seconds - before.cpu_seconds < 0.02 * seconds
    )


def disagreements(answers: Answers) -> dict[int, str]:
    """Ranks whose sequence of collectives differs from that of the first rank of the same communicator, and how."""
    found: dict[int, str] = {}
    for rank, answer in answers.items():
        for communicator, names in answer.history.items():
            first = communicator.ranks[0]
            reference = answers[first].history.get(communicator, []) if first in answers else []
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


def _recorded_mismatches(answers: Answers) -> list[str]:
    return [f"collective mismatch: rank {rank} {how}" for rank, how in disagreements(answers).items()]


def _missing_members(stuck: dict[int, Blocked], answers: Answers, returned: set[int]) -> list[str]:
    lines: dict[str, None] = {}
    for blocked in stuck.values():
        if blocked.sends is None:
            missing = _not_joined(blocked, stuck, answers)
            gone = [rank for rank in missing if rank in returned]
            if missing:
                lines[f"{blocked.name}: {_ranks(missing)} never joined"] = None
            if gone:
                lines[f"{_ranks(gone)} returned without it"] = None
    return list(lines)


def _not_joined(blocked: Blocked, stuck: dict[int, Blocked], answers: Answers) -> list[int]:
    """Members of the collective's group that have not begun it; by name if it bypassed `comm`."""
    if blocked.communicator is not None:
        return [
            rank
            for rank in blocked.communicator.ranks
            if rank in answers and answers[rank].joined.get(blocked.communicator, 0) <= blocked.sequence
        ]
    return [rank for rank in answers if rank not in stuck or stuck[rank].name != blocked.name]


def _cycle(stuck: dict[int, Blocked], answers: Answers, returned: set[int]) -> list[str]:
    waits: dict[int, list[int]] = {}
    for rank, blocked in stuck.items():
        if blocked.sends is None:
            waits[rank] = [other for other in _not_joined(blocked, stuck, answers) if other != rank]
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


def _unsent_messages(stuck: dict[int, Blocked], answers: Answers, returned: set[int]) -> list[str]:
    lines = []
    for rank, blocked in stuck.items():
        peer = blocked.peer
        if blocked.sends is not False or peer is None or peer not in answers:
            continue
        offered = {
            tag: count - answers[rank].received[peer, tag]
            for (target, tag), count in answers[peer].sent.items()
            if target == rank and count > answers[rank].received[peer, tag]
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
