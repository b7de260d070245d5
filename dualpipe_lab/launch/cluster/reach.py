"""`check_reach`: every rank connects once to every other node before GLOO does.

Chapter: book/appendix/gpus.  In: a place, address and port, of each rank.  Out: nothing, or one message on all ranks.
GLOO tries four times, for the whole timeout each, before it says that it cannot connect, and then not to whom.
"""

import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch.distributed import Store

Place: TypeAlias = tuple[str, int]  # address and port
PROBE_SECONDS = 5.0  # within which a host of one cluster answers
_BACKLOG = 1024  # ranks that connect at once; nobody accepts them
_LEAST_WAIT, _LONGEST_WAIT = 0.01, 0.2  # seconds between two looks at the store


def listener(address: str) -> socket.socket:
    """Return a socket on which this rank listens, at a port that the kernel chooses, until all have connected."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=_BACKLOG)


def check_reach(meeting: "Store", generation: int, rank: int, places: Sequence[Place], deadline: float) -> str:
    """Connect to one rank of every other address, and wait until all ranks have; return what went wrong, or nothing.

    Args:
        meeting: the store of the ranks.
        generation: of this start.
        rank: of this process.
        places: where each rank listens.
        deadline: in seconds of `time.monotonic`.
    """
    problem = _first_problem(rank, places)
    if problem:
        meeting.set(f"{generation}/unreached", problem)
    meeting.add(f"{generation}/reached", 1)
    wait = _LEAST_WAIT
    while True:
        num_reached = meeting.add(f"{generation}/reached", 0)
        if meeting.check([f"{generation}/unreached"]):
            return str(meeting.get(f"{generation}/unreached"), "utf-8")
        if num_reached >= len(places):
            return ""
        if time.monotonic() > deadline + PROBE_SECONDS:
            return f"{len(places) - num_reached} of {len(places)} ranks have not tried to reach the others in time"
        time.sleep(wait)
        wait = min(1.5 * wait, _LONGEST_WAIT)


def _first_problem(rank: int, places: Sequence[Place]) -> str:
    own, _ = places[rank]
    others = {address: (other, port) for other, (address, port) in enumerate(places) if address != own}
    for address, (other, port) in others.items():
        try:
            socket.create_connection((address, port), timeout=PROBE_SECONDS, source_address=(own, 0)).close()
        except OSError as error:
            return f"rank {rank} at {own} does not reach rank {other} at {address} ({error})"
    return ""
