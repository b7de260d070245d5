"""Messages of a program: which ones it needs, and whether a lowered program sends and receives exactly these.

A lowered program has one send and one receive per message, in time, and in one order at both ends of a link.  The order
matters because NCCL has no tags: the first message sent over a link is the first one received from it.
"""

from collections import defaultdict
from typing import NamedTuple

from dualpipe_lab.pp.program import MESSAGE_KINDS, RECV_B, RECV_F, SEND_B, SEND_F, Action, F, Program, actions_of
from dualpipe_lab.pp.validation.errors import Problems
from dualpipe_lab.pp.validation.index import Survey


class Delivery(NamedTuple):
    """One message that a program needs: its send and its receive, and the actions that make and use it."""

    send: Action
    recv: Action
    made_by: Action
    used_by: Action


def strip(program: Program) -> Program:
    """Return the program without its sends and receives.

    >>> print(strip(Program.parse("one", ["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"])))
    # one: 2 ranks, 2 stages, 1 microbatches
    rank 0: 0F0 0B0
    rank 1: 1F0 1B0
    """
    kept = [[s for s in steps if actions_of(s)[0].kind not in MESSAGE_KINDS] for steps in program.ranks]
    return program.with_ranks(kept)


def deliveries(program: Program, found: Survey) -> list[Delivery]:
    """Return every message that crosses ranks; stages that meet on one rank hand over without any."""
    needed = []
    for (stage, microbatch), rank in program.placement.items():
        if stage + 1 < program.num_stages and program.placement[stage + 1, microbatch] != rank:
            near, far = Action(stage, F, microbatch), Action(stage + 1, F, microbatch)
            needed.append(Delivery(Action(stage, SEND_F, microbatch), Action(stage + 1, RECV_F, microbatch), near, far))
            near, far = found.backward(stage, microbatch), found.backward(stage + 1, microbatch)
            needed.append(Delivery(Action(stage + 1, SEND_B, microbatch), Action(stage, RECV_B, microbatch), far, near))
    return needed


def check_deliveries(program: Program, found: Survey, problems: Problems) -> None:
    """Check the sends and receives of a lowered program whose work is complete."""
    needed = deliveries(program, found)
    for delivery in needed:
        _check_end(delivery.send, delivery.made_by, found, problems, after=True)
        _check_end(delivery.recv, delivery.used_by, found, problems, after=False)
    expected = {message for delivery in needed for message in (delivery.send, delivery.recv)}
    for action in found.number:
        if action[1] in MESSAGE_KINDS and action not in expected:
            where = "rank {}, position {}".format(*found.place(action))
            problems.add(f"{where}: {Action(*action)} has no other end on another rank; remove it")
    if not problems.total:
        _check_links(needed, found, problems)


def _check_end(message: Action, work: Action, found: Survey, problems: Problems, after: bool) -> None:
    rank, position = found.place(work)
    belongs = f"it belongs {'after' if after else 'before'} {work} (rank {rank}, position {position})"
    if message not in found.number:
        problems.add(f"{message} is missing; {belongs}")
        return
    where = found.place(message)
    if where[0] != rank or (where[1] < position) is after:
        problems.add(f"rank {where[0]}, position {where[1]}: {message} is in the wrong place; {belongs}")


def _check_links(needed: list[Delivery], found: Survey, problems: Problems) -> None:
    links: defaultdict[tuple[int, int], list[Delivery]] = defaultdict(list)
    for delivery in needed:
        links[found.place(delivery.send)[0], found.place(delivery.recv)[0]].append(delivery)
    for (src, dst), messages in links.items():
        in_sending = sorted(messages, key=lambda delivery: found.number[delivery.send])
        in_receiving = sorted(messages, key=lambda delivery: found.number[delivery.recv])
        for sent, received in zip(in_sending, in_receiving, strict=True):
            if sent != received:
                problems.add(
                    f"rank {src} sends {sent.send} where rank {dst} expects the other end of {received.recv}; messages "
                    "between two ranks arrive in the order of sending, so send and receive them in one order"
                )
                break
