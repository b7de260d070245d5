"""`ReplicatedGrads`: sums the gradients of weights that several ranks hold, before the optimizer reads them.

Chapter: book/pp/dualpipe.  In: partial gradients.  Out: the same sum on every rank, bit for bit.
  mirrors   a stage on two ranks, one per direction (Easy-DualPipe, DualPipe).  Each rank has the gradient of half of
            the microbatches, and sends it once: the bytes of the weights of its stages
  tied      one weight in two stages (embedding and output layer).  Each stage has the gradient of one of its two uses
All ranks add the gradients in one order, so equal weights stay equal.  All ranks also launch the exchanges in one
order, by stage, source and target, and on NCCL, which has no tags, only after the step.  Where data parallelism shards
the gradients while the backwards run (ZeRO-2 and 3), the mirrors add their shards.
Elsewhere: DeepSeek's DualPipe leaves the mirrors to the caller; Megatron all-reduces tied embeddings.
`GradientSync` tells data parallelism, whose synchronizers it finds by the hooks on the parameters, when the backward
of a microbatch through a stage begins and ends (B, or W where it is split), and when a stage has its last gradient:
with mirrors to add, when both copies have been added.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations, product
from math import isclose
from typing import NamedTuple, TypeAlias
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab.comm import Pending
from dualpipe_lab.comm.groups import members
from dualpipe_lab.grad_ready import Absent, GradShard, Synchronizer, grad_shards_of, synchronizers_of
from dualpipe_lab.launch.context import rank_context
from dualpipe_lab.pp.program import Action, B, I, Program, W
from dualpipe_lab.pp.runtime.p2p import PipelineP2P
from dualpipe_lab.pp.runtime.stage import ReadyAction, Stage

Grads: TypeAlias = list[tuple[nn.Parameter | None, Tensor]]  # full gradients with their parameter, shards without


class _Exchange(NamedTuple):
    """Gradients of one type, and the same as one flat tensor for each rank that holds them."""

    grads: Grads
    by_rank: dict[int, Tensor]


def has_copies(program: Program) -> bool:
    """Return whether a program has a stage that several ranks hold, as DualPipe's do."""
    return any(len(ranks) > 1 for ranks in _holders(program).values())


def _holders(program: Program) -> dict[int, list[int]]:
    holders: defaultdict[int, set[int]] = defaultdict(set)
    for (stage, _), rank in program.placement.items():
        holders[stage].add(rank)
    return {stage: sorted(ranks) for stage, ranks in holders.items()}


class ReplicatedGrads:
    """Sums the gradients of one rank's stages that other ranks hold too.

    Attributes:
        is_summed: whether the gradients are sums over the copies, until the next step begins.
        num_microbatches: of a step.
    """

    def __init__(self, program: Program, rank: int, p2p: PipelineP2P, modules: Mapping[int, nn.Module]) -> None:
        self._rank, self._p2p, self._modules = rank, p2p, modules
        self._holders = _holders(program)
        self.is_summed = False
        self._tied: list[Mapping[int, str]] = []  # summed since the last step began
        self._started: dict[int, list[Pending[_Exchange]]] = {}  # by stage, one per type
        self.num_microbatches = program.num_microbatches

    def is_replicated(self, stage: int) -> bool:
        """Whether another rank holds a stage too."""
        return self.holders(stage) != [self._rank]

    def holders(self, stage: int) -> list[int]:
        """Return the ranks of the pipeline that hold a stage."""
        return self._holders[stage]

    def check_weights(self) -> None:
        """Raise ValueError if a mirror has other weights; all ranks of the pipeline call it."""
        mine = {stage: _checksum(module) for stage, module in self._modules.items() if self.is_replicated(stage)}
        every: list[dict[int, int]] = [{}] * comm.get_world_size(self._p2p.group)
        dist.all_gather_object(every, mine, self._p2p.group)  # past `comm`: no message of the user's
        for rank, stage in _unlike(mine, every):
            raise ValueError(
                f"ranks {self._rank} and {rank} of the pipeline hold stage {stage} with different weights, and its "
                "gradients are those of both; build each copy after torch.manual_seed with one seed, or give the "
                "optimizer the Mesh and the program, and it makes them equal"
            )

    def check_shards(self) -> None:
        """Raise ValueError if a mirror keeps other shards of the gradients; all ranks of the pipeline call it."""
        layouts = {stage: _layout(module) for stage, module in self._modules.items()}
        for rank, stage in _unlike(layouts, comm.all_gather_object(layouts, self._p2p.group)):
            raise ValueError(
                f"ranks {rank} and {self._rank} of the pipeline add their gradients of stage {stage} and shard them in "
                "different ways; give both the same kind of optimizer, with the same options, over the same stages in "
                "the same order"
            )

    def begin_step(self, adds_copies: bool) -> None:
        """Leave each sum of earlier steps to one rank and stage, so that the sums of this step count it once."""
        if self.is_summed or adds_copies:
            for stage, module in self._modules.items():
                if self.holders(stage)[0] != self._rank:
                    _zero(module.parameters())
        for names in self._tied:
            for stage in sorted(names.keys() & self._modules.keys()):
                if stage != min(names):
                    _zero([self._modules[stage].get_parameter(names[stage])])
        self.is_summed, self._tied = False, []

    def start(self, stage: int) -> None:
        """Launch the exchange of a stage's gradients with its mirrors; on NCCL, leave it to `finish`."""
        if not self._p2p.in_order:
            self._launch(stage)

    def _launch(self, stage: int) -> None:
        if stage in self._started or not self.is_replicated(stage):
            return
        self._started[stage] = []
        for number, grads in enumerate(_grads(self._modules[stage])):
            local = torch.cat([grad.flatten() for _, grad in grads])
            by_rank = {self._rank: local}
            messages = []
            tag = self._p2p.grads_tag(stage, number)
            for source, target in permutations(self._holders[stage], 2):
                if target == self._rank:
                    by_rank[source] = torch.empty_like(local)
                    messages.append(self._p2p.receive(by_rank[source], source, tag))
                elif source == self._rank:
                    messages.append(self._p2p.send(local, target, tag, f"gradients of stage {stage}"))
            receives = self._p2p.launch(messages)
            self._started[stage].append(Pending(receives, partial(_Exchange, grads, by_rank)))

    def finish(self) -> None:
        """Sum the gradients of all mirrors; launch the exchanges that were not started."""
        for stage in sorted(self._modules):
            self._launch(stage)
        exchanges = [pending.wait() for pendings in self._started.values() for pending in pendings]
        self._p2p.wait_for_sends()
        for grads, by_rank in exchanges:
            total = _sum([by_rank[rank] for rank in sorted(by_rank)])
            summed = total.split([grad.numel() for _, grad in grads])
            for (parameter, grad), new in zip(grads, summed, strict=True):
                _set(parameter, grad, new.view_as(grad))
        self._started.clear()
        self.is_summed = True

    def sum_tied(self, names: Mapping[int, str]) -> None:
        """Sum the gradients of one weight that stands, under `names`, in several stages; mirrors come first.

        A frozen weight has none: it is frozen in all of its stages, or in none.
        """
        here = [
            (stage, self._modules[stage].get_parameter(name)) for stage, name in names.items() if stage in self._modules
        ]
        local = {stage: parameter for stage, parameter in here if parameter.requires_grad}
        grads = {stage: _grad(parameter) for stage, parameter in local.items()}
        if not local:
            return
        like = next(iter(grads.values()))
        messages = []
        for target, stage in product(range(self._p2p.num_ranks), sorted(names)):
            source = self._source(target, stage, names) if self._is_tied(target, names) else target
            tag = self._p2p.grads_tag(stage)
            if source == target:
                continue
            if target == self._rank:
                grads[stage] = torch.empty_like(like)
                messages.append(self._p2p.receive(grads[stage], source, tag))
            elif source == self._rank:
                messages.append(self._p2p.send(grads[stage], target, tag, f"tied weight of stage {stage}"))
        for receive in self._p2p.launch(messages):
            receive.wait()
        self._p2p.wait_for_sends()
        total = _sum([grads[stage] for stage in sorted(names)])
        for parameter in local.values():
            _set(parameter, _grad(parameter), total)
        self._tied.append(names)

    def _is_tied(self, rank: int, names: Mapping[int, str]) -> bool:
        return any(rank in self._holders[stage] for stage in names)

    def _source(self, rank: int, stage: int, names: Mapping[int, str]) -> int:
        """Return the rank from which `rank` gets the gradient of `stage`: itself, or a holder in its direction."""
        holders = self._holders[stage]
        if rank in holders:
            return rank
        same_stage = next(self._holders[other] for other in sorted(names) if rank in self._holders[other])
        return holders[same_stage.index(rank) % len(holders)]


def _unlike(mine: Mapping[int, object], every: Sequence[Mapping[int, object]]) -> Iterator[tuple[int, int]]:
    """Yield each rank and stage of which that rank has something else."""
    for rank, others in enumerate(every):
        yield from ((rank, stage) for stage in sorted(mine.keys() & others.keys()) if mine[stage] != others[stage])


def _grads(module: nn.Module) -> list[Grads]:
    """Return the gradients in lists of one type each: full gradients, or the shards that this rank keeps."""
    lists: defaultdict[torch.dtype, Grads] = defaultdict(list)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    pieces = grad_shards_of(trained)
    for parameter in trained:
        if parameter not in pieces:
            lists[parameter.dtype].append((parameter, _grad(parameter)))
        elif (piece := pieces[parameter]) is not None:
            lists[parameter.dtype].append((None, piece.values))
    return list(lists.values())


def _zero(parameters: Iterable[nn.Parameter]) -> None:
    given = list(parameters)
    pieces = grad_shards_of(given)
    for parameter in given:
        piece = pieces.get(parameter)
        grad = parameter.grad if parameter not in pieces else None if piece is None else piece.values
        if grad is not None:
            grad.zero_()


def _layout(module: nn.Module) -> list[tuple[int, int] | None]:
    """Return start and length of each gradient's shard on this rank; None for a full gradient."""
    pieces = grad_shards_of(module.parameters())
    return [_span(pieces[parameter]) if parameter in pieces else None for parameter in module.parameters()]


def _checksum(module: nn.Module) -> int:
    """Return a number that follows from the bits of all weights, in their order; ZeRO-3's are left out."""
    found = 0
    for weight in module.parameters():
        if not isinstance(weight, Absent):
            found = crc32(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy(), found)
    return found


def _span(piece: GradShard | None) -> tuple[int, int]:
    return (0, 0) if piece is None else (piece.start, len(piece.values))


def _grad(parameter: Tensor) -> Tensor:
    """Return a contiguous gradient; zeros for a parameter that no microbatch of this rank has used."""
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad.contiguous()


def _set(parameter: nn.Parameter | None, grad: Tensor, total: Tensor) -> None:
    if parameter is None:  # a shard, in place
        grad.copy_(total)
    elif parameter.grad is None or parameter.grad.is_sparse:
        parameter.grad = total.clone()
    else:
        parameter.grad.copy_(total)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return sum(parts[1:], parts[0].clone())


class GradientSync:
    """Tells the synchronizers of data parallelism when the gradients of this rank's stages are complete."""

    def __init__(
        self, stages: Mapping[int, Stage], replicated: ReplicatedGrads, p2p: PipelineP2P, sum_copies: bool
    ) -> None:
        self._stages, self._modules = stages, {index: stage.module for index, stage in stages.items()}
        self._replicated, self._p2p, self._sum_copies = replicated, p2p, sum_copies
        self._found: dict[int, dict[Synchronizer, list[nn.Parameter]]] = {}
        self._compared: list[Synchronizer] | None = None

    def begin_step(self) -> None:
        """Find the synchronizers, and tell them that the pipeline says when gradients are complete."""
        self._find()
        stages: dict[Synchronizer, list[list[nn.Parameter]]] = {}
        for found in self._found.values():
            for owner, parameters in found.items():
                stages.setdefault(owner, []).append(parameters)
        for owner, lists in stages.items():
            owner.pipeline = self._p2p.global_ranks
            owner.begin_step(lists, self._replicated.num_microbatches)
            owner.lone_copies = [i for i, found in self._found.items() if owner in found and self._is_lone(i, owner)]
        self._replicated.begin_step(self._sum_copies)

    def check_shares(self, shares: Sequence[float]) -> None:
        """Raise ValueError for shares that are divided by the data ranks, over which gradients are averaged."""
        for owner in {owner for found in self._found.values() for owner in found if owner.divisor > 1}:
            is_whole = 0 < owner.num_backwards <= self._replicated.num_microbatches  # else several calls make a step
            if is_whole and isclose(sum(shares) * owner.divisor, 1.0):
                raise ValueError(
                    f"the weights of the microbatches add up to 1 / {owner.divisor}, and the optimizer averages over "
                    f'{owner.divisor} data ranks once more; leave the weights out, give the optimizer reduce="sum", or '
                    "where several calls make a step, set num_backwards to the microbatches of all"
                )

    def begin(self, ready: ReadyAction, last_backward: Mapping[int, Action]) -> None:
        """Announce the backward of a microbatch through a stage: B, W, or an I that does the work of both."""
        index, kind, _ = ready.action
        if kind == B or (kind == I and ready.full_backward) or (kind == W and not ready.full_backward):
            ends_stage = last_backward.get(index) in (ready.action, ready.action._replace(kind=W))
            is_last = ends_stage and not self.needs_mirror(index)
            for owner, parameters in self._found[index].items():
                owner.begin_backward(parameters, is_last)

    def end(self, done: ReadyAction) -> None:
        """Announce the end of that backward."""
        index, kind, _ = done.action
        if kind in (B, W):
            for owner, parameters in self._found[index].items():
                owner.end_backward(parameters)

    def ready(self, index: int) -> None:
        """Announce that the gradients of a stage are complete."""
        for owner, parameters in self._found[index].items():
            owner.ready(parameters)

    def needs_mirror(self, index: int) -> bool:
        """Return whether a stage's gradients are incomplete until the gradients of its mirror are added."""
        return self._sum_copies and self._replicated.is_replicated(index)

    def sum_copies(self) -> None:
        """Add the gradients of all copies."""
        self._replicated.finish()
        for found in self._found.values():
            for owner in found:
                owner.lone_copies = ()

    def sums(self, index: int) -> bool:
        """Return whether gradients of a stage are summed over ranks: over its copies, or by data parallelism."""
        return self._replicated.is_replicated(index) or bool(self._found.get(index))

    def _is_lone(self, index: int, owner: Synchronizer) -> bool:
        """Whether a stage has copies whose gradients data parallelism does not add."""
        ranks = {self._p2p.global_ranks[rank] for rank in self._replicated.holders(index)}
        return len(ranks) > 1 and not ranks <= {*members(owner.group)}

    def check_mirrors(self) -> None:
        """Raise ValueError if mirrors cannot be added now, or not as they are sharded; all ranks call it."""
        self._find()
        for found in self._found.values():
            for owner, parameters in found.items():
                owner.check_addition(parameters)
        self._check_shards()

    def check_tied(self, names: Mapping[int, str]) -> bool:
        """Return whether a tied weight is still to be summed; raise ValueError if it cannot be now."""
        local = {
            stage: self._modules[stage].get_parameter(names[stage]) for stage in names.keys() & self._modules.keys()
        }
        if len(set(local.values())) < len(local):
            raise ValueError(
                f"stages {sorted(local)} of this rank share one parameter, whose gradient is their sum already; leave "
                "out sum_tied, or give each stage a parameter of its own"
            )
        for stage, parameter in local.items():
            for owner in synchronizers_of(parameter):
                if owner.sums_tied:
                    return False
                if owner.is_sharded:
                    raise ValueError(
                        f"{names[stage]} of stage {stage} is tied to other stages, and {owner.name} shards its "
                        "gradient over the data ranks; give it the Mesh in place of the group, or use DDP for stages "
                        "with tied weights"
                    )
                owner.check_addition([parameter])
        return True

    def _find(self) -> None:
        self._found = {}
        for index, module in self._modules.items():
            found = self._found.setdefault(index, {})
            for parameter in module.parameters():
                for owner in synchronizers_of(parameter):
                    found.setdefault(owner, []).append(parameter)
            self._stages[index].synchronizers = found.keys()
            for owner, parameters in found.items():
                owner.check_stage(module, parameters)
                self._check_group(index, owner)
        if self._sum_copies:
            self._check_shards()

    def _check_group(self, index: int, owner: Synchronizer) -> None:
        ranks, holders = set(members(owner.group)), self._replicated.holders(index)
        for rank, other in enumerate(self._p2p.global_ranks):
            if other not in ranks or other == rank_context().rank:
                continue
            if rank not in holders:
                raise ValueError(
                    f"data parallelism sums the gradients of stage {index} over ranks {sorted(ranks)}; rank {other} "
                    "of this pipeline has other stages; give it the ranks along dp"
                )
            if self._sum_copies:
                raise ValueError(
                    f"stage {index} has its mirror on rank {other}, and data parallelism sums over that rank too: it "
                    "would count twice; say sum_copies=False, or leave out that rank"
                )

    def _check_shards(self) -> None:
        """Compare weights with the mirrors, and how gradients are sharded during the step; both once."""
        if self._compared is None:
            self._replicated.check_weights()
            self._compared = []
        owners = [owner for found in self._found.values() for owner in found if owner.grad_shards() is not None]
        if owners != self._compared:
            self._replicated.check_shards()
            self._compared = owners
