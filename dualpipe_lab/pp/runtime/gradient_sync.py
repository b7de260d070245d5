"""`GradientSync`: tells data parallelism which gradients of this rank's stages are complete while a step runs.

In: stages, actions.  Out: calls of `Synchronizer`.
  calls       when the backward of a microbatch through a stage begins and ends (B, or W where it is split), and when a
              stage has its last gradient; with mirrors to add, when both copies have been added
  found by    the hooks on the parameters, at the beginning of every step
"""

from collections.abc import Mapping

from torch import nn

from dualpipe_lab.comm.groups import members
from dualpipe_lab.grad_ready import Synchronizer, synchronizers_of
from dualpipe_lab.launch.context import rank_context
from dualpipe_lab.pp.program import Action, B, I, W
from dualpipe_lab.pp.runtime.p2p import PipelineP2P
from dualpipe_lab.pp.runtime.replicated_grads import ReplicatedGrads
from dualpipe_lab.pp.runtime.stage import ReadyAction, Stage


class GradientSync:
    """Tells the synchronizers of data parallelism when the gradients of this rank's stages are complete.

    Args:
        stages: the stages of this rank.
        replicated: the stages that other ranks hold too.
        p2p: the ranks of the pipeline.
        sum_mirrors: whether each step adds the gradients of the mirrors.
    """

    def __init__(
        self, stages: Mapping[int, Stage], replicated: ReplicatedGrads, p2p: PipelineP2P, sum_mirrors: bool
    ) -> None:
        self._modules = {index: stage.module for index, stage in stages.items()}
        self._replicated, self._p2p, self._sum_mirrors = replicated, p2p, sum_mirrors
        self._found: dict[int, dict[Synchronizer, list[nn.Parameter]]] = {}
        self._compared: list[Synchronizer] = []

    def begin_step(self) -> None:
        """Find the synchronizers, and tell them that the pipeline says when gradients are complete.

        Raises:
            ValueError: a synchronizer sums over ranks of this pipeline with other stages, or over mirrors that the
                step adds.
        """
        self._find()
        stages: dict[Synchronizer, list[list[nn.Parameter]]] = {}
        for found in self._found.values():
            for owner, parameters in found.items():
                stages.setdefault(owner, []).append(parameters)
        for owner, lists in stages.items():
            owner.begin_step(lists)

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
        """Whether the gradients of a stage are complete only when those of its mirror have been added."""
        return self._sum_mirrors and self._replicated.is_replicated(index)

    def check_mirrors(self) -> None:
        """Raise ValueError if mirrors cannot be added now, or not as they are sharded; all ranks call it."""
        self._find()
        for found in self._found.values():
            for owner, parameters in found.items():
                owner.check_addition(parameters)
        self._check_shards()

    def check_tied(self, names: Mapping[int, str]) -> bool:
        """Return whether a tied weight is still to be summed; raise ValueError if it cannot be now."""
        for stage in names.keys() & self._modules.keys():
            parameter = self._modules[stage].get_parameter(names[stage])
            for owner in synchronizers_of(parameter):
                if owner.sums_tied:
                    return False
                if owner.is_sharded:
                    raise ValueError(
                        f"{names[stage]} of stage {stage} is tied to other stages, and {owner.name} shards its "
                        "gradient over the data ranks; give it the Mesh in place of the group, or use Ddp for stages "
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
            for owner, parameters in found.items():
                owner.check_stage(module, parameters)
                self._check_group(index, owner)
        if self._sum_mirrors:
            self._check_shards()

    def _check_group(self, index: int, owner: Synchronizer) -> None:
        """Refuse a group whose ranks do not hold the gradients of this stage on other data."""
        ranks, holders = set(members(owner.group)), self._replicated.holders(index)
        for rank, other in enumerate(self._p2p.global_ranks):
            if other not in ranks or other == rank_context().rank:
                continue
            if rank not in holders:
                raise ValueError(
                    f"data parallelism sums the gradients of stage {index} over ranks {sorted(ranks)}; rank {other} "
                    "of this pipeline has other stages; give it the ranks along dp"
                )
            if self._sum_mirrors:
                raise ValueError(
                    f"stage {index} has its mirror on rank {other}, and data parallelism sums over that rank too: it "
                    "would count twice; leave out sum_mirrors=True, or that rank"
                )

    def _check_shards(self) -> None:
        """Compare shards with the mirrors, once; not for gradients that stay unsharded until the sums begin."""
        owners = [owner for found in self._found.values() for owner in found if owner.grad_shards() is not None]
        if owners != self._compared:
            self._replicated.check_shards()
            self._compared = owners
