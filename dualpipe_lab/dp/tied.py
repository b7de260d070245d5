"""`TiedStages`: sums the gradients of one weight that two or more stages of a pipeline hold, after the data sums.

Chapter: book/pp/dualpipe.  In: `module.stages`, `module.tied`, a program.  Out: the same sum in every copy.
  several ranks         an all-reduce of this rank's shard of the weight, among the ranks that hold one of the stages
  all stages on each    no message: DualPipe and DualPipeV place the first and the last stage on one rank
Each stage has the gradient of one use of the weight.  A sum over ranks and a sum over stages may change places, so that
the data ranks come first, and ZeRO's shards are added instead of full gradients.  Of mirrored stages, which have been
added before, the first holder's counts.
Elsewhere: Megatron `_allreduce_word_embedding_grads`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.pp.program import Program
from dualpipe_lab.world.mesh import Mesh


class TiedStages:
    """The stages that hold one weight, as `module.tied` names it by stage; every rank of the world makes it.

    Args:
        module: this rank's part of the model.
        mesh: of the world.
        program: of the pipeline.

    Attributes:
        stage_of: this rank's copies of the weight, and the stage of each.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, program: Program | None) -> None:
        names, stages, holders = tied_names(module), numbered_stages(module) or {}, holders_of(program)
        if program is None and not names.keys() <= stages.keys():
            raise ValueError(
                f"stages {sorted(names)} hold one weight, and stages {sorted(stages)} are here; give the optimizer the "
                "Mesh and the program, which say where the others are"
            )
        self.stage_of = {stages[index].get_parameter(names[index]): index for index in sorted(names) if index in stages}
        here = mesh.rank("pp")
        self._counted = {index for index in names if holders.get(index, (here,))[0] == here}
        ranks = sorted({rank for index in names for rank in holders.get(index, ())})
        self._group: Group | None = None
        self._is_local = all(holders.get(index, ()) == tuple(ranks) for index in names)
        if not self._is_local:
            groups = [[group[rank] for rank in ranks] for group in mesh.topology.groups("pp")]
            made = [(comm.new_group(group), group) for group in groups]
            self._group = next((group for group, members in made if mesh.global_rank in members), None)

    def add(self, gradients: Mapping[int, Tensor]) -> None:
        """Replace this rank's gradients of the weight, by stage, by the sum over all stages."""
        if len(gradients) < 2 and self._is_local:
            return
        if not gradients:
            return
        counted = [grad for index, grad in sorted(gradients.items()) if self._is_local or index in self._counted]
        total = sum(counted, torch.zeros_like(next(iter(gradients.values()))))
        if not self._is_local:
            comm.all_reduce(total, group=self._group)
        for grad in gradients.values():
            grad.copy_(total)


def holders_of(program: Program | None) -> dict[int, tuple[int, ...]]:
    """Return the ranks of a pipeline that hold each stage.

    >>> holders_of(Program.parse("two stages", ["0F0 0B0", "1F0 1B0"]))
    {0: (0,), 1: (1,)}
    """
    found: dict[int, set[int]] = {}
    for (stage, _), rank in program.placement.items() if program else ():
        found.setdefault(stage, set()).add(rank)
    return {stage: tuple(sorted(ranks)) for stage, ranks in found.items()}


def numbered_stages(module: nn.Module) -> Mapping[int, nn.Module] | None:
    """Return `module.stages` by number; None for a module that has none, or something else under that name."""
    stages = getattr(module, "stages", None)
    return stages if isinstance(stages, Mapping) else None


def tied_names(module: nn.Module) -> dict[int, str]:
    """Return the names of the weight that several stages hold, by stage; empty where they share none."""
    return dict(getattr(module, "tied", None) or {}) if numbered_stages(module) else {}
