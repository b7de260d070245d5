"""Right answers of another style to the exercises on ranks and messages."""

DIRECT = '''
"""Sums by direct messages: every rank sends every other rank the block that is its own."""

import torch

from dualpipe_lab import comm


def exchanged(outgoing, ranks):
    """Send outgoing[j] to rank j of the group; return what every rank has sent to this one."""
    me, works, arrived = ranks.index(comm.get_rank()), [], []
    for place, peer in enumerate(ranks):
        if place == me:
            arrived.append(outgoing[me])
            continue
        arrived.append(torch.zeros_like(outgoing[me]))
        works.append(comm.irecv(arrived[place], peer))
        works.append(comm.isend(outgoing[place].contiguous(), peer))
    for work in works:
        work.wait()
    return arrived


def pass_on(x, like, ranks):
    me = ranks.index(comm.get_rank())
    into = torch.zeros(like.shape, dtype=like.dtype)
    receiving = comm.irecv(into, ranks[me - 1], tag=9)
    comm.isend(x.contiguous(), (ranks * 2)[me + 1], tag=9).wait()
    receiving.wait()
    return into


def reduce_scatter(x, ranks):
    return torch.stack(exchanged(x.detach().chunk(len(ranks)) if len(x) else [x] * len(ranks), ranks)).sum(0)


def all_gather(x, ranks):
    return torch.cat(exchanged([x] * len(ranks), ranks))


def padded(x, num):
    rows = -(-x.numel() // num)
    whole = torch.zeros(num * rows, dtype=x.dtype)
    whole[: x.numel()] = x.reshape(-1)
    return whole


@torch.no_grad()
def all_reduce(x, ranks):
    blocks = list(padded(x, len(ranks)).view(len(ranks), -(-x.numel() // len(ranks))))
    total = sum(exchanged(blocks, ranks))
    x[...] = torch.cat(exchanged([total] * len(ranks), ranks))[: x.numel()].reshape(x.shape)
'''

BLOCKING = '''
"""A ring of blocking messages: the first rank of the group receives first, all others send first."""

from torch import Tensor, cat, empty, no_grad, zeros_like

from dualpipe_lab.comm import get_rank, recv, send


def pass_on(x: Tensor, like: Tensor, ranks: list[int]) -> Tensor:
    place, into = ranks.index(get_rank()), empty(like.shape, dtype=like.dtype)
    right, left = ranks[place + 1 - len(ranks)], ranks[place - 1]
    if place == 0:
        recv(into, left)
        send(x.contiguous(), right)
    else:
        send(x.contiguous(), right)
        recv(into, left)
    return into


def reduce_scatter(x: Tensor, ranks: list[int]) -> Tensor:
    size, place = len(x) // len(ranks), ranks.index(get_rank())
    partial = zeros_like(x[:size])
    for owner in range(place - 1, place - 1 - len(ranks), -1):
        first = owner % len(ranks) * size
        partial = partial + x[first : first + size]
        if owner % len(ranks) != place:
            partial = pass_on(partial, partial, ranks)
    return partial


def all_gather(x: Tensor, ranks: list[int]) -> Tensor:
    place, of = ranks.index(get_rank()), {}
    for step in range(len(ranks)):
        of[(place - step) % len(ranks)] = x
        x = pass_on(x, x, ranks) if step + 1 < len(ranks) else x
    return cat([of[owner] for owner in sorted(of)])


def padded(x: Tensor, num: int) -> Tensor:
    rest = x.numel() % num
    return cat([x.reshape(-1), x.new_zeros(num - rest if rest else 0)])


def all_reduce(x: Tensor, ranks: list[int]) -> None:
    with no_grad():
        flat = padded(x, len(ranks))
        x.copy_(all_gather(reduce_scatter(flat, ranks), ranks).narrow(0, 0, x.numel()).reshape(x.shape))
'''

RIGHT = {
    "ranks-4": {
        "no ring: each block straight to its owner": DIRECT,
        "blocking messages, and slices of the tensor": BLOCKING,
    },
    "ranks-3": {
        "even ranks first": [
            (
                "works = [comm.irecv(from_left, left), comm.irecv(from_right, right)]\n"
                "    works += [comm.isend(x[-1:].contiguous(), right), comm.isend(x[:1].contiguous(), left)]\n"
                "    for work in works:\n        work.wait()",
                "if rank % 2 == 0:\n"
                "        comm.send(x[-1:].clone(), right)\n        comm.recv(from_left, left)\n"
                "        comm.send(x[:1].clone(), left)\n        comm.recv(from_right, right)\n"
                "    else:\n"
                "        comm.recv(from_left, left)\n        comm.send(x[-1:].clone(), right)\n"
                "        comm.recv(from_right, right)\n        comm.send(x[:1].clone(), left)",
            )
        ],
        "a tag for each direction": [
            (
                "works = [comm.irecv(from_left, left), comm.irecv(from_right, right)]\n"
                "    works += [comm.isend(x[-1:].contiguous(), right), comm.isend(x[:1].contiguous(), left)]\n",
                "works = [comm.isend(x[:1].clone(), left, tag=1), comm.isend(x[-1:].clone(), right, tag=2)]\n"
                "    works += [comm.irecv(from_right, right, tag=1), comm.irecv(from_left, left, tag=2)]\n",
            )
        ],
    },
}
