"""The time of a ring whose messages travel while it computes, simulated step by step.

Chapter: book/cp/ring-layouts.  In: work per rank and step, time per message.  Out: when each rank finishes, in ns.
  a step        max(work, message) where all ranks are equal: a shorter message is hidden by the work
  forward       work + (c - 1) max(work, message): the last step sends no message
  backward      the gradients of a block are sent after the work on it: the last hop is never hidden
A rank begins a step when its block has arrived and the block it sent has left.  A link carries one message at a time.
Source: Liu, Zaharia and Abbeel 2023 (arXiv 2310.01889), section 3, "arithmetic intensity".
"""

from collections.abc import Sequence
from typing import NamedTuple

Ns = Sequence[Sequence[int]]  # by rank and step


class MessageTimes(NamedTuple):
    """Times of messages in ns: `transfer` on the link, by rank and step; `latency` until the last byte arrives."""

    transfer: Ns
    latency: int


class _Links:
    """The links from each rank to the next one."""

    def __init__(self, num_ranks: int, latency: int) -> None:
        self.free, self.latency = [0] * num_ranks, latency

    def send(self, rank: int, now: int, transfer: int) -> int:
        """Return when the message has left; it arrives `latency` later."""
        self.free[rank] = max(now, self.free[rank]) + transfer
        return self.free[rank]


def ring_forward_ns(work: Ns, kv: MessageTimes) -> list[int]:
    """Return when each rank has finished the forward of a ring.

    >>> ring_forward_ns([[10, 10], [10, 10]], MessageTimes([[4], [4]], latency=1))
    [20, 20]
    >>> ring_forward_ns([[10, 10], [10, 10]], MessageTimes([[14], [14]], latency=1))
    [25, 25]
    """
    num_ranks = len(work)
    now, links = [0] * num_ranks, _Links(num_ranks, kv.latency)
    for step in range(num_ranks):
        left = _start(now, links, kv, step)
        now = [time + spent[step] for time, spent in zip(now, work, strict=True)]
        now = _arrived(now, left, links.latency)
    return now


def ring_backward_ns(work: Ns, kv: MessageTimes, dkv: MessageTimes) -> list[int]:
    """Return when each rank has finished the backward: gradients travel behind the blocks, and one hop further.

    >>> ring_backward_ns([[10, 10], [10, 10]], MessageTimes([[4], [4]], 1), MessageTimes([[4, 4], [4, 4]], 1))
    [25, 25]
    """
    num_ranks = len(work)
    now, links = [0] * num_ranks, _Links(num_ranks, kv.latency)
    dkv_left: list[int] | None = None
    for step in range(num_ranks):
        kv_left = _start(now, links, kv, step)
        now = [time + spent[step] for time, spent in zip(now, work, strict=True)]
        now = _arrived(now, dkv_left, links.latency)
        if num_ranks > 1:
            dkv_left = [links.send(rank, now[rank], dkv.transfer[rank][step]) for rank in range(num_ranks)]
        now = _arrived(now, kv_left, links.latency)
    return _arrived(now, dkv_left, links.latency)


def _start(now: list[int], links: _Links, kv: MessageTimes, step: int) -> list[int] | None:
    """Send the block of every rank to the next rank, unless this is the last step."""
    if step == len(now) - 1:
        return None
    return [links.send(rank, time, kv.transfer[rank][step]) for rank, time in enumerate(now)]


def _arrived(now: list[int], left: list[int] | None, latency: int) -> list[int]:
    """Wait until the message of the previous rank has arrived and this rank's message has left."""
    if left is None:
        return now
    return [max(time, left[rank - 1] + latency, left[rank]) for rank, time in enumerate(now)]
