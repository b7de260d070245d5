"""How long a ring takes whose messages travel while it computes: simulated step by step, exactly.

Chapter: book/cp/ring-attention.  In: work per rank and step, time per message.  Out: when each rank is done, in ns.
  a step        max(work, message) where all ranks are equal: a message is hidden as long as it is the shorter
  forward       starts with no message to wait for; the last step sends none: work + (c - 1) max(work, message)
  backward      the gradients of a block leave after the work on it: the last hop is always in sight
A rank goes on when its block has come and its own has left; a link carries one message after the other.
Source: Liu, Zaharia and Abbeel 2023 (arXiv 2310.01889), section 3, "arithmetic intensity".
"""

from collections.abc import Sequence
from typing import NamedTuple

Ns = Sequence[Sequence[int]]  # by rank and step


class Messages(NamedTuple):
    """Nanoseconds for which the link carries a message of this rank and step, and until its last byte has arrived."""

    transfer: Ns
    latency: int


class _Links:
    """The link of every rank to the next one."""

    def __init__(self, num_ranks: int, latency: int) -> None:
        self.free, self.latency = [0] * num_ranks, latency

    def send(self, rank: int, now: int, transfer: int) -> int:
        """When the message has left; it arrives `latency` later."""
        self.free[rank] = max(now, self.free[rank]) + transfer
        return self.free[rank]


def forward_ns(work: Ns, kv: Messages) -> list[int]:
    """When each rank is done with the forward of a ring.

    >>> forward_ns([[10, 10], [10, 10]], Messages([[4], [4]], latency=1))
    [20, 20]
    >>> forward_ns([[10, 10], [10, 10]], Messages([[14], [14]], latency=1))
    [25, 25]
    """
    num_ranks = len(work)
    now, links = [0] * num_ranks, _Links(num_ranks, kv.latency)
    for step in range(num_ranks):
        left = _start(now, links, kv, step)
        now = [time + spent[step] for time, spent in zip(now, work, strict=True)]
        now = _arrived(now, left, links.latency)
    return now


def backward_ns(work: Ns, kv: Messages, dkv: Messages) -> list[int]:
    """When each rank is done with the backward: blocks travel ahead, their gradients behind, one hop more.

    >>> backward_ns([[10, 10], [10, 10]], Messages([[4], [4]], 1), Messages([[4, 4], [4, 4]], 1))
    [25, 25]
    """
    num_ranks = len(work)
    now, links = [0] * num_ranks, _Links(num_ranks, kv.latency)
    behind: list[int] | None = None
    for step in range(num_ranks):
        ahead = _start(now, links, kv, step)
        now = [time + spent[step] for time, spent in zip(now, work, strict=True)]
        now = _arrived(now, behind, links.latency)
        if num_ranks > 1:
            behind = [links.send(rank, now[rank], dkv.transfer[rank][step]) for rank in range(num_ranks)]
        now = _arrived(now, ahead, links.latency)
    return _arrived(now, behind, links.latency)


def _start(now: list[int], links: _Links, kv: Messages, step: int) -> list[int] | None:
    """Send every rank's block on, if a step follows."""
    if step == len(now) - 1:
        return None
    return [links.send(rank, time, kv.transfer[rank][step]) for rank, time in enumerate(now)]


def _arrived(now: list[int], left: list[int] | None, latency: int) -> list[int]:
    """Wait until what the rank before has sent is here, and the own message has left."""
    if left is None:
        return now
    return [max(time, left[rank - 1] + latency, left[rank]) for rank, time in enumerate(now)]
