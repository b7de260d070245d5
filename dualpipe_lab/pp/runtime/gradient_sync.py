"""Who sums the gradients of this rank's stages over data ranks, and what they are told while a step runs.

In: stages, tasks.  Out: calls of `Synchronizer`.
  told when   the backward of a microbatch through a stage begins and ends (B, or W where it is split), and when a stage
              has its last gradient; with mirrors to add, when both copies have been added
  found by    the hooks on the parameters, at the beginning of every step
"""

from collections.abc import Mapping

from torch import nn

from dualpipe_lab.comm.groups import members
from dualpipe_lab.dp.synchronizer import Synchronizer, synchronizers_of
from dualpipe_lab.pp.program import Action, B, I, W
from dualpipe_lab.pp.runtime.p2p import Post
from dualpipe_lab.pp.runtime.replicated_grads import Copies
from dualpipe_lab.pp.runtime.stage import Stage
from dualpipe_lab.pp.runtime.task import Task
from dualpipe_lab.world.context import rank_context


class GradientSync:
    """Tells those who sum gradients over data ranks how far the stages of this rank are.

    Args:
        stages: those of this rank.
        copies: which of them other ranks hold too.
        post: of the pipeline.
        sums_mirrors: whether each step adds the copies.
    """

    def __init__(self, stages: Mapping[int, Stage], copies: Copies, post: Post, sums_mirrors: bool) -> None:
        self._modules = {index: stage.module for index, stage in stages.items()}
        self._copies, self._post, self._sums_mirrors = copies, post, sums_mirrors
        self._found: dict[int, dict[Synchronizer, list[nn.Parameter]]] = {}
        self._compared: list[Synchronizer] = []

    def begin_step(self) -> None:
        """Find the synchronizers and let them know who leads.

        Raises:
            ValueError: one of them sums over ranks of this pipeline that have other stages, or mirrors that are added.
        """
        self._find()
        stages: dict[Synchronizer, list[list[nn.Parameter]]] = {}
        for found in self._found.values():
            for owner, parameters in found.items():
                stages.setdefault(owner, []).append(parameters)
        for owner, lists in stages.items():
            owner.begin_step(lists)

    def begin(self, task: Task, last: Mapping[int, Action]) -> None:
        """Announce the backward of a microbatch through a stage: B, W, or an I that does the work of both."""
        index, kind, _ = task.action
        if kind == B or (kind == I and task.whole) or (kind == W and not task.whole):
            is_last = last.get(index) in (task.action, task.action._replace(kind=W)) and not self.waits(index)
            for owner, parameters in self._found[index].items():
                owner.begin_backward(parameters, is_last)

    def end(self, task: Task) -> None:
        """Say that it is over."""
        index, kind, _ = task.action
        if kind in (B, W):
            for owner, parameters in self._found[index].items():
                owner.end_backward(parameters)

    def ready(self, index: int) -> None:
        """Say that the gradients of a stage are complete."""
        for owner, parameters in self._found[index].items():
            owner.ready(parameters)

    def waits(self, index: int) -> bool:
        """Whether a stage is complete only when its mirrors have been added."""
        return self._sums_mirrors and self._copies.are_elsewhere(index)

    def check_mirrors(self) -> None:
        """Raise ValueError if mirrors cannot be added now, or not as they are sharded; all ranks call it."""
        self._find()
        for found in self._found.values():
            for owner, parameters in found.items():
                owner.check_addition(parameters)
        self._check_shards()

    def check_tied(self, names: Mapping[int, str]) -> None:
        """Raise ValueError if a tied weight cannot be summed now."""
        for stage in names.keys() & self._modules.keys():
            parameter = self._modules[stage].get_parameter(names[stage])
            for owner in synchronizers_of(parameter):
                if owner.is_sharded:
                    raise ValueError(
                        f"{names[stage]} of stage {stage} is tied to other stages, and {type(owner).__name__} shards "
                        "its gradient over the data ranks; use Ddp for stages with tied weights"
                    )
                owner.check_addition([parameter])

    def _find(self) -> None:
        self._found = {}
        for index, module in self._modules.items():
            found = self._found.setdefault(index, {})
            for parameter in module.parameters():
                for owner in synchronizers_of(parameter):
                    found.setdefault(owner, []).append(parameter)
            for owner, parameters in found.items():
                owner.check_stage(module, parameters)
                self._check_group(index, owner)
        if self._sums_mirrors:
            self._check_shards()

    def _check_group(self, index: int, owner: Synchronizer) -> None:
        """Refuse a group along which the gradients of a stage are not those of other data."""
        ranks, holders = set(members(owner.group)), self._copies.holders(index)
        for rank, other in enumerate(self._post.global_ranks):
            if other not in ranks or other == rank_context().rank:
                continue
            if rank not in holders:
                raise ValueError(
                    f"data parallelism sums the gradients of stage {index} over ranks {sorted(ranks)}; rank {other} "
                    "of this pipeline has other stages; give it the ranks along dp"
                )
            if self._sums_mirrors:
                raise ValueError(
                    f"stage {index} has its mirror on rank {other}, and data parallelism sums over that rank too: it "
                    "would count twice; leave out sum_mirrors=True, or that rank"
                )

    def _check_shards(self) -> None:
        """Compare layouts with the mirrors, once; ranks whose gradients are whole until the sums begin need not."""
        owners = [owner for found in self._found.values() for owner in found if owner.pieces() is not None]
        if owners != self._compared:
            self._copies.check_shards()
            self._compared = owners
