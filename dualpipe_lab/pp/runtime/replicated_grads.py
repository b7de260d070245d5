"""Weights that several ranks hold: the gradients of their copies are summed before the optimizer sees them.

Chapter: book/pp/dualpipe.  In: gradients, each a part of the whole.  Out: the same sum on every rank, bit for bit.
  mirrors   a stage on two ranks, one per direction (Easy-DualPipe, DualPipe): each has seen half of the microbatches.
            Each rank sends its gradients once: as many bytes as the weights of its stages have
  tied      one weight in two stages (embedding and output layer): each stage has seen one of its two uses
All ranks add the copies in one order, so equal weights stay equal.  Where data parallelism shards the gradients while
the backwards run (ZeRO-2 and 3), the mirrors add their shards.
Elsewhere: DeepSeek's DualPipe leaves the mirrors to the caller; Megatron all-reduces tied embeddings.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab.comm import Work
from dualpipe_lab.dp.synchronizer import Piece, pieces_of
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.runtime.p2p import Post

Grads: TypeAlias = list[tuple[nn.Parameter | None, Tensor]]  # whole ones with their parameter, shards without


class Copies:
    """The gradients of one rank's stages that have copies elsewhere."""

    def __init__(self, program: Program, rank: int, post: Post, modules: Mapping[int, nn.Module]) -> None:
        self._rank, self._post, self._modules = rank, post, modules
        holders: defaultdict[int, set[int]] = defaultdict(set)
        for (stage, _), holder in program.placement.items():
            holders[stage].add(holder)
        self._holders = {stage: sorted(ranks) for stage, ranks in holders.items()}
        self._under_way: dict[int, list[tuple[Grads, dict[int, Tensor]]]] = {}  # by stage, per type: flat ones by rank
        self._works: list[Work] = []

    def are_elsewhere(self, stage: int) -> bool:
        """Whether another rank holds a stage too."""
        return self.holders(stage) != [self._rank]

    def holders(self, stage: int) -> list[int]:
        """The ranks of the pipeline that hold a stage."""
        return self._holders[stage]

    def check_shards(self) -> None:
        """Compare with the mirrors which parts of the gradients their ranks keep; all ranks of the pipeline call it.

        Raises:
            ValueError: other parts than here.
        """
        mine = {stage: _layout(module) for stage, module in self._modules.items()}
        for rank, theirs in enumerate(comm.all_gather_object(mine, self._post.group)):
            for stage in sorted(mine.keys() & theirs.keys()):
                if mine[stage] != theirs[stage]:
                    raise ValueError(
                        f"ranks {rank} and {self._rank} of the pipeline add their gradients of stage {stage} and shard "
                        "them in different ways; give both the same kind of optimizer, with the same options, over the "
                        "same stages in the same order"
                    )

    def start(self, stage: int) -> None:
        """Begin to exchange the gradients of a stage with the ranks that hold it too."""
        if stage in self._under_way or not self.are_elsewhere(stage):
            return
        self._under_way[stage] = []
        for number, grads in enumerate(_grads(self._modules[stage])):
            own = torch.cat([grad.flatten() for _, grad in grads])
            parts = {self._rank: own}
            for other in self._holders[stage]:
                if other != self._rank:
                    parts[other] = torch.empty_like(own)
                    tag = self._post.copies_tag(stage, number)
                    self._works.append(self._post.irecv(parts[other], other, tag))
                    self._post.isend(own, other, tag, f"gradients of stage {stage}")
            self._under_way[stage].append((grads, parts))

    def finish(self) -> None:
        """Sum the mirrors of all stages, those that were not begun included."""
        for stage in self._modules:
            self.start(stage)
        self._wait()
        for grads, parts in chain.from_iterable(self._under_way.values()):
            total = _sum([parts[rank] for rank in sorted(parts)])
            for (parameter, grad), part in zip(grads, total.split([grad.numel() for _, grad in grads]), strict=True):
                _set(parameter, grad, part.view_as(grad))
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
            _set(parameter, _grad(parameter), total)

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


def _grads(module: nn.Module) -> list[Grads]:
    """The gradients, in lists of one type each: whole ones, or what this rank keeps of them."""
    lists: defaultdict[torch.dtype, Grads] = defaultdict(list)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    pieces = pieces_of(trained)
    for parameter in trained:
        if parameter not in pieces:
            lists[parameter.dtype].append((parameter, _grad(parameter)))
        elif (piece := pieces[parameter]) is not None:
            lists[parameter.dtype].append((None, piece.values))
    return list(lists.values())


def _layout(module: nn.Module) -> list[tuple[int, int] | None]:
    """Where the part of each gradient that this rank keeps begins, and how long it is; None for all of it."""
    pieces = pieces_of(module.parameters())
    return [_span(pieces[parameter]) if parameter in pieces else None for parameter in module.parameters()]


def _span(piece: Piece | None) -> tuple[int, int]:
    return (0, 0) if piece is None else (piece.start, len(piece.values))


def _grad(parameter: Tensor) -> Tensor:
    """A contiguous gradient; zeros for a parameter that no microbatch of this rank has used."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()


def _set(parameter: nn.Parameter | None, grad: Tensor, total: Tensor) -> None:
    if parameter is None:  # a shard, in place
        grad.copy_(total)
    elif parameter.grad is None:
        parameter.grad = total.clone()
    else:
        parameter.grad.copy_(total)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return sum(parts[1:], parts[0].clone())
