"""Sums and gathers on a ring of ranks: N - 1 messages of a block each."""

import torch
from torch import Tensor

from dualpipe_lab.comm import get_rank, irecv, isend


def pass_on(x: Tensor, like: Tensor, ranks: list[int]) -> Tensor:
    """Send x to the next rank; return what the rank before has sent, which has the shape of `like`."""
    me = ranks.index(get_rank())
    arrived = torch.empty_like(like, memory_format=torch.contiguous_format)
    works = [isend(x.contiguous(), ranks[(me + 1) % len(ranks)]), irecv(arrived, ranks[me - 1])]
    for work in works:
        work.wait()
    return arrived


def reduce_scatter(x: Tensor, ranks: list[int]) -> Tensor:
    """Sum N equal blocks along dimension 0 over the ranks; return this rank's block."""
    num, me = len(ranks), ranks.index(get_rank())
    blocks = x.reshape(num, len(x) // num, *x.shape[1:])
    total = blocks[(me - 1) % num].clone()
    for step in range(1, num):
        total = blocks[(me - step - 1) % num] + pass_on(total, total, ranks)
    return total


def all_gather(x: Tensor, ranks: list[int]) -> Tensor:
    """The blocks of all ranks, one after the other along dimension 0."""
    num, me = len(ranks), ranks.index(get_rank())
    arrived = [x]
    for _ in range(num - 1):
        arrived.append(pass_on(arrived[-1], x, ranks))
    return torch.cat([arrived[(me - owner) % num] for owner in range(num)])


def padded(x: Tensor, num: int) -> Tensor:
    """The numbers of x in one row, with zeros behind them up to a multiple of `num`."""
    flat = x.flatten()
    return torch.cat([flat, flat.new_zeros(-len(flat) % num)])


def all_reduce(x: Tensor, ranks: list[int]) -> None:
    """Replace x, of any size, by its sum over the ranks."""
    with torch.no_grad():
        whole = all_gather(reduce_scatter(padded(x, len(ranks)), ranks), ranks)
        x.copy_(whole[: x.numel()].view_as(x))
