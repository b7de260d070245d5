"""Gradients that leave while the backward still runs."""

from collections.abc import Iterable

import torch
from torch import Tensor

from dualpipe_lab.comm import Work, get_rank, irecv, isend

from .ring import all_gather, padded

FIRST_TAG = 3  # of the first bucket


class Buckets:
    """Sums the gradients of parameters, in buckets of at most `num_bytes`, after so many backwards."""

    def __init__(self, parameters: Iterable[Tensor], ranks: list[int], num_bytes: int, num_backwards: int = 1) -> None:
        """Fill the buckets, the last parameter first, and hang a hook on every parameter."""
        self.ranks, self.num_backwards = ranks, num_backwards
        self.buckets: list[list[Tensor]] = []
        for parameter in reversed(list(parameters)):
            if not self.buckets or sum(p.nbytes for p in self.buckets[-1]) + parameter.nbytes > num_bytes:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
            parameter.register_post_accumulate_grad_hook(self._arrived)
        self._reset()

    def finish(self) -> None:
        """Start what is left, wait for all of it, and put the sums in place of the gradients."""
        me = self.ranks.index(get_rank())
        for number in range(len(self.buckets)):
            if number not in self.started:
                self._start(number)
        for number, (own, arriving, works) in sorted(self.started.items()):  # one order on all ranks
            for work in works:
                work.wait()
            arriving.insert(me, own[me])
            whole = all_gather(torch.stack(arriving).sum(0), self.ranks)
            sizes = [parameter.numel() for parameter in self.buckets[number]]
            for parameter, part in zip(self.buckets[number], whole[: sum(sizes)].split(sizes), strict=True):
                parameter.grad = part.view_as(parameter).clone()
        self._reset()

    def _reset(self) -> None:
        self.missing = [len(bucket) * self.num_backwards for bucket in self.buckets]
        self.started: dict[int, tuple[Tensor, list[Tensor], list[Work]]] = {}

    def _arrived(self, parameter: Tensor) -> None:
        number = next(n for n, bucket in enumerate(self.buckets) if any(p is parameter for p in bucket))
        self.missing[number] -= 1
        if self.missing[number] == 0:
            self._start(number)

    def _start(self, number: int) -> None:
        """Send every other rank its block of a bucket, and make room for the blocks that they send."""
        num, tag = len(self.ranks), FIRST_TAG + number
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.buckets[number]]
        own = padded(torch.cat([grad.flatten() for grad in grads]), num).view(num, -1)
        arriving, works = [], []
        for peer, block in zip(self.ranks, own, strict=True):
            if peer != get_rank():
                arriving.append(torch.empty_like(block))
                works += [isend(block, peer, tag), irecv(arriving[-1], peer, tag)]
        self.started[number] = own, arriving, works
