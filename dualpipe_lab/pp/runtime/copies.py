"""Weights that several ranks hold: the gradients of their copies are summed before the optimizer sees them.

Chapter: book/pp/dualpipe.  In: gradients, each a part of the whole.  Out: the same sum on every rank, bit for bit.
  mirrors   a stage on two ranks, one per direction (Easy-DualPipe, DualPipe): each has seen half of the microbatches.
            Each rank sends its gradients once: as many bytes as the weights of its stages have
  tied      one weight in two stages (embedding and output layer): each stage has seen one of its two uses
All ranks add the copies in one order, so equal weights stay equal.
Elsewhere: DeepSeek's DualPipe leaves the mirrors to the caller; Megatron all-reduces tied embeddings.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.runtime.post import Post
from dualpipe_lab.world.comm import Work


class Copies:
    """The gradients of one rank's stages that have copies elsewhere."""

    def __init__(self, program: Program, rank: int, post: Post, modules: Mapping[int, nn.Module]) -> None:
        self._rank, self._post, self._modules = rank, post, modules
        holders: defaultdict[int, set[int]] = defaultdict(set)
        for (stage, _), holder in program.placement.items():
            holders[stage].add(holder)
        self._holders = {stage: sorted(ranks) for stage, ranks in holders.items()}
        self._under_way: dict[int, list[dict[int, Tensor]]] = {}  # by stage: per type, the flat gradients by rank
        self._works: list[Work] = []

    def start(self, stage: int) -> None:
        """Begin to exchange the gradients of a stage with the ranks that hold it too."""
        others = [rank for rank in self._holders[stage] if rank != self._rank]
        if stage in self._under_way or not others:
            return
        self._under_way[stage] = []
        for number, parameters in enumerate(_by_type(self._modules[stage])):
            own = torch.cat([_grad(parameter).flatten() for parameter in parameters])
            parts = {self._rank: own}
            for other in others:
                parts[other] = torch.empty_like(own)
                tag = self._post.copies_tag(stage, number)
                self._works.append(self._post.irecv(parts[other], other, tag))
                self._post.isend(own, other, tag, f"gradients of stage {stage}")
            self._under_way[stage].append(parts)

    def finish(self) -> None:
        """Sum the mirrors of all stages, those that were not begun included."""
        for stage in self._modules:
            self.start(stage)
        self._wait()
        for stage, by_type in self._under_way.items():
            for parameters, parts in zip(_by_type(self._modules[stage]), by_type, strict=True):
                total = _sum([parts[rank] for rank in sorted(parts)])
                sizes = [parameter.numel() for parameter in parameters]
                for parameter, part in zip(parameters, total.split(sizes), strict=True):
                    _set(parameter, part.view_as(parameter))
        self._under_way.clear()

    def sum_tied(self, names: Mapping[int, str]) -> None:
        """Sum the gradients of one weight that stands, under `names`, in several stages; mirrors come first."""
        mine = {
            stage: self._modules[stage].get_parameter(name) for stage, name in names.items() if stage in self._modules
        }
        found = {stage: _grad(parameter) for stage, parameter in mine.items()}
        if not mine:
            return
        like = next(iter(found.values()))
        for stage in names:
            if stage not in mine:
                found[stage] = torch.empty_like(like)
                source = self._source(self._rank, stage, names)
                self._works.append(self._post.irecv(found[stage], source, self._post.copies_tag(stage)))
        for other in range(self._post.num_ranks):
            for stage in mine if other != self._rank else ():
                if self._is_tied(other, names) and self._source(other, stage, names) == self._rank:
                    self._post.isend(found[stage], other, self._post.copies_tag(stage), f"tied weight of stage {stage}")
        self._wait()
        total = _sum([found[stage] for stage in sorted(names)])
        for parameter in mine.values():
            _set(parameter, total)

    def _is_tied(self, rank: int, names: Mapping[int, str]) -> bool:
        return any(rank in self._holders[stage] for stage in names)

    def _source(self, rank: int, stage: int, names: Mapping[int, str]) -> int:
        """The rank from which `rank` gets the gradient of `stage`: itself, or the holder of its own direction."""
        holders = self._holders[stage]
        if rank in holders:
            return rank
        own = next(self._holders[other] for other in sorted(names) if rank in self._holders[other])
        return holders[own.index(rank) % len(holders)]

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()
        self._post.close()


def _by_type(module: nn.Module) -> list[list[nn.Parameter]]:
    """The trainable parameters, in lists of one type each."""
    lists: defaultdict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
    for parameter in module.parameters():
        if parameter.requires_grad:
            lists[parameter.dtype].append(parameter)
    return list(lists.values())


def _grad(parameter: Tensor) -> Tensor:
    """A contiguous gradient; zeros for a parameter that no microbatch of this rank has used."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()


def _set(parameter: Tensor, grad: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = grad.clone()
    else:
        parameter.grad.copy_(grad)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return sum(parts[1:], parts[0].clone())
