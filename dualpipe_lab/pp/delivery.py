"""Messages of a lowered program: one send and one receive each, in time, and in one order at both ends of a link.

The order matters because NCCL has no tags: the first message sent over a link is the first one received from it.
"""

from collections import defaultdict
from typing import NamedTuple

from dualpipe_lab.pp.problems import Problems
from dualpipe_lab.pp.program import RECV_B, RECV_F, SEND_B, SEND_F, Action, Cell, F, Program
from dualpipe_lab.pp.survey import Place, Survey


class Delivery(NamedTuple):
    """One message that a program needs: its send and its receive, and the places of the actions at its ends."""

    send: Action
    recv: Action
    made: Place
    used: Place


def deliveries(program: Program, found: Survey) -> list[Delivery]:
    """Return every message that crosses ranks; stages that meet on one rank hand over without any."""
    needed = []
    for (stage, microbatch), forward in found.places[F].items():
        for next_stage, send, recv in (stage + 1, SEND_F, RECV_F), (stage - 1, SEND_B, RECV_B):
            if not 0 <= next_stage < program.num_stages:
                continue
            here, there = (stage, microbatch), (next_stage, microbatch)
            made = forward if send == SEND_F else found.backward(here)[1]
            used = found.places[F][there] if send == SEND_F else found.backward(there)[1]
            if made[0] != used[0]:
                needed.append(
                    Delivery(Action(stage, send, microbatch), Action(next_stage, recv, microbatch), made, used)
                )
    return needed


def check_deliveries(program: Program, found: Survey, problems: Problems) -> None:
    """Check the sends and receives of a lowered program."""
    needed = deliveries(program, found)
    for delivery in needed:
        _check_end(delivery.send, delivery.made, found, problems, after=True)
        _check_end(delivery.recv, delivery.used, found, problems, after=False)
    _check_needless(needed, found, problems)
    if not problems.total:
        _check_links(needed, found, problems)


def _check_end(message: Action, work: Place, found: Survey, problems: Problems, after: bool) -> None:
    rank, position = work
    place = found.places[message.kind].get((message.stage, message.microbatch))
    needed = f"{'after' if after else 'before'} position {position} of rank {rank}"
    if place is None:
        problems.add(f"{message} is missing; it belongs {needed}")
    elif place[0] != rank:
        problems.add(f"{message} is on rank {place[0]}; it belongs {needed}")
    elif (place[1] < position) is after:
        problems.add(f"{message} is at position {place[1]} of rank {rank}; it belongs {needed}")


def _check_needless(needed: list[Delivery], found: Survey, problems: Problems) -> None:
    expected: defaultdict[str, set[Cell]] = defaultdict(set)
    for delivery in needed:
        for message in (delivery.send, delivery.recv):
            expected[message.kind].add((message.stage, message.microbatch))
    for kind in (SEND_F, RECV_F, SEND_B, RECV_B):
        for stage, microbatch in found.places[kind].keys() - expected[kind]:
            rank, position = found.places[kind][stage, microbatch]
            problems.add(
                f"rank {rank}, position {position}: {stage}{kind}{microbatch} has no partner: "
                "the other stage does not exist or is on this rank; remove it"
            )


def _check_links(needed: list[Delivery], found: Survey, problems: Problems) -> None:
    links: defaultdict[tuple[int, int], list[tuple[int, int, Delivery]]] = defaultdict(list)
    for delivery in needed:
        sent = found.places[delivery.send.kind][delivery.send.stage, delivery.send.microbatch]
        received = found.places[delivery.recv.kind][delivery.recv.stage, delivery.recv.microbatch]
        links[sent[0], received[0]].append((sent[1], received[1], delivery))
    for (src, dst), messages in links.items():
        in_sending, in_receiving = sorted(messages), sorted(messages, key=lambda message: message[1])
        for (_, _, first), (_, _, received) in zip(in_sending, in_receiving, strict=True):
            if first != received:
                problems.add(
                    f"rank {src} sends {first.send} where rank {dst} expects {received.recv}; messages between two "
                    "ranks arrive in the order of sending: send and receive them in one order"
                )
                break
