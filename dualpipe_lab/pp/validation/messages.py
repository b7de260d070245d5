"""Messages of a program: which it needs, and whether a lowered program sends and receives exactly these.

A lowered program has one send and one receive per message.  The send stands after the action that makes the result, the
receive before the action that uses it, and both ends of a link have one order.  The order matters because NCCL has no
tags: a rank receives the messages of a link in the order in which they were sent.
NCCL asks for more (`check_in_order`): it completes everything between two ranks, sends and receives of both directions
together, in the order in which each rank launches it.  Two ranks that launch the same messages in one order never wait
for each other by this rule; the waits between actions are those of buffered messages.
"""

from collections import defaultdict
from typing import NamedTuple

from dualpipe_lab.pp.program import MESSAGE_KINDS, RECV_B, RECV_F, SEND_B, SEND_F, Action, F, Program, actions_of
from dualpipe_lab.pp.validation.errors import ProblemList
from dualpipe_lab.pp.validation.index import ActionIndex


class RequiredMessage(NamedTuple):
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


def required_messages(program: Program, index: ActionIndex) -> list[RequiredMessage]:
    """Return every message between two ranks; neighbouring stages on one rank need none."""
    needed = []
    for (stage, m), rank in program.placement.items():
        if stage + 1 < program.num_stages and program.placement[stage + 1, m] != rank:
            near, far = Action(stage, F, m), Action(stage + 1, F, m)
            needed.append(RequiredMessage(Action(stage, SEND_F, m), Action(stage + 1, RECV_F, m), near, far))
            near, far = index.backward(stage, m), index.backward(stage + 1, m)
            needed.append(RequiredMessage(Action(stage + 1, SEND_B, m), Action(stage, RECV_B, m), far, near))
    return needed


def check_messages(program: Program, index: ActionIndex, problems: ProblemList) -> None:
    """Check the sends and receives of a lowered program whose work is complete."""
    needed = required_messages(program, index)
    for message in needed:
        _check_end(message.send, message.made_by, index, problems, after=True)
        _check_end(message.recv, message.used_by, index, problems, after=False)
    expected = {end for message in needed for end in (message.send, message.recv)}
    for action in index.number:
        if action[1] in MESSAGE_KINDS and action not in expected:
            where = "rank {}, position {}".format(*index.locate(action))
            problems.add(f"{where}: {Action(*action)} has no other end on another rank; remove it")
    if not problems.total:
        _check_links(needed, index, problems)


def _check_end(message: Action, work: Action, index: ActionIndex, problems: ProblemList, after: bool) -> None:
    rank, position = index.locate(work)
    belongs = f"it belongs {'after' if after else 'before'} {work} (rank {rank}, position {position})"
    if message not in index.number:
        problems.add(f"{message} is missing; {belongs}")
        return
    where = index.locate(message)
    if where[0] != rank or (where[1] < position) is after:
        problems.add(f"rank {where[0]}, position {where[1]}: {message} is in the wrong place; {belongs}")


def _check_links(needed: list[RequiredMessage], index: ActionIndex, problems: ProblemList) -> None:
    links: defaultdict[tuple[int, int], list[RequiredMessage]] = defaultdict(list)
    for message in needed:
        links[index.locate(message.send)[0], index.locate(message.recv)[0]].append(message)
    for (src, dst), messages in links.items():
        in_sending = sorted(messages, key=lambda message: index.number[message.send])
        in_receiving = sorted(messages, key=lambda message: index.number[message.recv])
        for sent, received in zip(in_sending, in_receiving, strict=True):
            if sent != received:
                problems.add(
                    f"rank {src} sends {sent.send} where rank {dst} expects the other end of {received.recv}; messages "
                    "between two ranks arrive in the order of sending, so send and receive them in one order"
                )
                break


def check_in_order(program: Program, index: ActionIndex, problems: ProblemList) -> None:
    """Check that any two ranks launch the messages between them, those of both directions together, in one order."""
    ends: defaultdict[tuple[int, int], list[tuple[Action, Action]]] = defaultdict(list)
    for send, recv, _, _ in required_messages(program, index):
        src, dst = index.locate(send)[0], index.locate(recv)[0]
        ends[min(src, dst), max(src, dst)].append((send, recv) if src < dst else (recv, send))
    for (rank, other), messages in ends.items():
        first = sorted(messages, key=lambda pair: index.number[pair[0]])
        second = sorted(messages, key=lambda pair: index.number[pair[1]])
        for place, ((here, _), (_, there)) in enumerate(zip(first, second, strict=True)):
            if first[place] != second[place]:
                problems.add(
                    f"deadlock in order: message {place} between ranks {rank} and {other} is {here} for rank {rank} "
                    f"(position {index.locate(here)[1]}) and {there} for rank {other} (position "
                    f"{index.locate(there)[1]}); NCCL has no tags and completes the messages between two ranks in the "
                    "order of their launch; lower() the program anew"
                )
                break
