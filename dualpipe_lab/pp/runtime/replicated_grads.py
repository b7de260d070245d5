"""`ReplicatedGrads`: sums the gradients of weights that several ranks hold, before the optimizer reads them.

Chapter: book/pp/dualpipe.  In: partial gradients.  Out: the same sum on every rank, bit for bit.
  mirrors   a stage on two ranks, one per direction (Easy-DualPipe, DualPipe).  Each rank has the gradient of half of
            the microbatches; an all-reduce of the two sends it once: the bytes of the weights of its stages
  tied      one weight in two stages (embedding and output layer).  Each stage has the gradient of one of its two uses
An all-reduce gives all ranks the same bits, so equal weights stay equal.  Where data parallelism shards the gradients
while the backwards run (ZeRO-2 and 3), the mirrors add their shards.
Elsewhere: DeepSeek's DualPipe leaves the mirrors to the caller; Megatron all-reduces tied embeddings.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from math import isclose

import torch.distributed as dist
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab._private import num_hooks
from dualpipe_lab.comm import Pending
from dualpipe_lab.comm.groups import Group, group_of, members
from dualpipe_lab.dp.sums import sum_of_mirrors, sum_of_tied, tied_ranks
from dualpipe_lab.grad_ready import Absent, GradShard, Synchronizer, grad_shards_of, synchronizers_of
from dualpipe_lab.grad_sums import all_reduce_together_async, dense_grad, sum_stages
from dualpipe_lab.launch.context import rank_context
from dualpipe_lab.pp.program import B, I, Program, W
from dualpipe_lab.pp.runtime.batch import checksum
from dualpipe_lab.pp.runtime.p2p import PipelineP2P
from dualpipe_lab.pp.runtime.stage import ReadyAction, Stage


def has_copies(program: Program) -> bool:
    """Return whether a program has a stage that several ranks hold, as DualPipe's do."""
    return any(len(ranks) > 1 for ranks in program.holders.values())


class ReplicatedGrads:
    """Sums the gradients of one rank's stages that other ranks hold too.

    Attributes:
        holders: the ranks of the pipeline that hold each stage.
        mirrors: the sum of each stage that another rank holds too, by stage, in the order of their launch.
        is_summed: whether the gradients are sums over the copies, until the next step begins.
        num_microbatches: of a step.
    """

    def __init__(self, program: Program, rank: int, p2p: PipelineP2P, modules: Mapping[int, nn.Module]) -> None:
        self._rank, self._p2p, self._modules = rank, p2p, modules
        self.holders, self.num_microbatches = program.holders, program.num_microbatches
        self.is_summed = False
        self._tied: list[Mapping[int, str]] = []  # summed since the last step began
        self._complete: set[int] = set()  # stages of this step with their last gradient
        self._groups: dict[int, Group] = {}  # of the mirrors, by stage, as their first sum makes them
        self._started: dict[int, Pending[None]] = {}  # by stage
        # both mirrors launch their sums in one order: that in which the first of them ends its stages
        ends = {
            stage: max(at for at, action in enumerate(program.actions(ranks[0])) if action.stage == stage)
            for stage, ranks in self.holders.items()
            if stage in modules and len(ranks) > 1
        }
        self.mirrors = {
            stage: sum_of_mirrors(
                stage, self._on_pipeline(self.holders[stage]), (name for name, _ in modules[stage].named_parameters())
            )
            for stage in sorted(ends, key=lambda stage: (ends[stage], stage))
        }

    def check_weights(self) -> None:
        """Raise ValueError if a mirror has other weights; all ranks of the pipeline call it."""
        mine = {stage: _checksum(module) for stage, module in self._modules.items() if stage in self.mirrors}
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
                if self.holders[stage][0] != self._rank:
                    _zero(module.parameters())
        for names in self._tied:
            for stage in sorted(names.keys() & self._modules.keys()):
                if stage != min(names):
                    _zero([self._modules[stage].get_parameter(names[stage])])
        self.is_summed, self._tied = False, []

    def start(self, stage: int) -> None:
        """Launch the sum of a stage's gradients with its mirrors; on NCCL, leave it to `finish`."""
        self._complete.add(stage)
        if not self._p2p.in_order:
            self._launch()

    def _launch(self) -> None:
        """Launch the sums of the stages that are complete, each behind those before it."""
        for stage in takewhile(self._complete.__contains__, self.mirrors):
            if stage not in self._started:
                if stage not in self._groups:
                    self._groups[stage] = group_of(self.mirrors[stage].ranks)
                grads = _grads(self._modules[stage])
                self._started[stage] = all_reduce_together_async(grads, self._groups[stage])

    def finish(self) -> None:
        """Sum the gradients of all mirrors; launch the sums that were not started."""
        self._complete.update(self.mirrors)
        self._launch()
        for pending in self._started.values():
            pending.wait()
        self._started.clear()
        self._complete.clear()
        self.is_summed = True

    def sum_tied(self, names: Mapping[int, str]) -> None:
        """Sum the gradients of one weight that stands, under `names`, in several stages; mirrors come first.

        A frozen weight has none: it is frozen in all of its stages, or in none.
        """
        here = {
            stage: self._modules[stage].get_parameter(names[stage]) for stage in names.keys() & self._modules.keys()
        }
        grads = {stage: dense_grad(here[stage]) for stage in sorted(here) if here[stage].requires_grad}
        one = sum_of_tied(self._on_pipeline(tied_ranks(self.holders, names, self._rank)), names.values())
        is_alone = len(one.ranks) == 1  # else of mirrors, which have been added, the first one counts
        counted = [grad for stage, grad in grads.items() if is_alone or self.holders[stage][0] == self._rank]
        sum_stages([*grads.values()], counted, one.ranks)
        self._tied.append(names)

    def _on_pipeline(self, ranks: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._p2p.global_ranks[rank] for rank in ranks)


def _unlike(mine: Mapping[int, object], every: Sequence[Mapping[int, object]]) -> Iterator[tuple[int, int]]:
    """Yield each rank and stage of which that rank has something else."""
    for rank, others in enumerate(every):
        yield from ((rank, stage) for stage in sorted(mine.keys() & others.keys()) if mine[stage] != others[stage])


def _grads(module: nn.Module) -> list[Tensor]:
    """Return the gradients: full ones, or the shards that this rank keeps."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    pieces = grad_shards_of(trained)
    found = []
    for parameter in trained:
        if parameter not in pieces:
            found.append(dense_grad(parameter))
        elif (piece := pieces[parameter]) is not None:
            found.append(piece.values)
    return found


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
            found = checksum(weight, found)
    return found


def _span(piece: GradShard | None) -> tuple[int, int]:
    return (0, 0) if piece is None else (piece.start, len(piece.values))


class GradientSync:
    """Tells the synchronizers of data parallelism when the gradients of this rank's stages are complete.

    It finds them by the hooks on the parameters, and tells them when the backward of a microbatch through a stage
    begins and ends (B, or W where it is split), and when a stage has its last gradient: with mirrors to add, when both
    copies have been added.
    """

    def __init__(
        self, stages: Mapping[int, Stage], replicated: ReplicatedGrads, p2p: PipelineP2P, sum_copies: bool
    ) -> None:
        self._stages, self._modules = stages, {index: stage.module for index, stage in stages.items()}
        self._replicated, self._p2p, self._sum_copies = replicated, p2p, sum_copies
        self._found: dict[int, dict[Synchronizer, list[nn.Parameter]]] = {}
        self._compared: list[Synchronizer] | None = None
        self._num_hooks = -1  # when the synchronizers were found

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

    def begin(self, ready: ReadyAction, ends_stage: bool) -> None:
        """Announce the backward of a microbatch through a stage: B, W, or an I that does the work of both."""
        index, kind, _ = ready.action
        if kind == B or (kind == I and ready.full_backward) or (kind == W and not ready.full_backward):
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
        return self._sum_copies and index in self._replicated.mirrors

    def sum_copies(self) -> None:
        """Add the gradients of all copies."""
        self._replicated.finish()
        for found in self._found.values():
            for owner in found:
                owner.lone_copies = ()

    def sums(self, index: int) -> bool:
        """Return whether gradients of a stage are summed over ranks: over its copies, or by data parallelism."""
        return index in self._replicated.mirrors or bool(self._found.get(index))

    def _is_lone(self, index: int, owner: Synchronizer | None) -> bool:
        """Whether a stage has copies whose gradients data parallelism, if there is any, does not add."""
        ranks = {self._p2p.global_ranks[rank] for rank in self._replicated.holders[index]}
        return len(ranks) > 1 and (owner is None or not ranks <= {*members(owner.group)})

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
            owners = synchronizers_of(parameter)
            self._check_added(stage, names, owners)
            for owner in owners:
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

    def _check_added(self, stage: int, names: Mapping[int, str], owners: Collection[Synchronizer]) -> None:
        """Raise ValueError for a stage whose mirrors are still to be added, where the first of them would count."""
        are_unlike = len({self._replicated.holders[other] for other in names}) > 1
        is_lone = any(self._is_lone(stage, one) for one in owners) if owners else self._is_lone(stage, None)
        if are_unlike and is_lone and not self._replicated.is_summed:
            raise ValueError(
                f"stage {stage} is tied to another stage and has copies on other ranks, whose gradients come first; "
                "leave out sum_copies=False, or call runtime.sum_copies() before sum_tied"
            )

    def _find(self) -> None:
        """Find the synchronizers again if a hook has been registered since, or theirs have been removed."""
        known = [pair for found in self._found.values() for pair in found.items()]
        if self._num_hooks == num_hooks() and all(owner in synchronizers_of(weights[0]) for owner, weights in known):
            return
        self._num_hooks = num_hooks()
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
        ranks, holders = set(members(owner.group)), self._replicated.holders[index]
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
