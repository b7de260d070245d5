"""`ExpertParallel`: the process groups of expert parallelism.

Chapter: book/ep/smoe.  In: process groups, or a mesh that has them.  Out: the argument `ep` of every layer here.
  experts of rank r    r E / e to (r + 1) E / e
Elsewhere: Megatron `expert_model_parallel_size` and `expert_data_parallel_group`; torchtitan `ExpertParallel`.
"""

from dataclasses import dataclass

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.ep.expert_rules import check_divides
from dualpipe_lab.launch.mesh import Mesh


@dataclass(frozen=True)
class ExpertParallel:
    """The ranks over which experts are sharded, and the ranks that replicate the same experts.

    Attributes:
        group: the ep group, whose ranks together hold all experts (default: the world).
        edp_group: the ranks that hold the same experts as this one, itself included; None: no other rank does.
    """

    group: Group | None = None
    edp_group: Group | None = None

    @classmethod
    def of(cls, mesh: Mesh) -> "ExpertParallel":
        """Take the `ep` and `edp` groups of a mesh; every rank of the world calls this, in the same order.

        Without an `ep` axis or `edp=`, every rank holds all experts, and the data-parallel ranks replicate them.
        """
        topology = mesh.topology
        edp = "edp" if topology.edp or "ep" in topology.names else "data"
        return cls(mesh.group("ep"), mesh.group(edp) if topology.size(edp) > 1 else None)

    @property
    def rank(self) -> int:
        """This rank's number in the ep group."""
        return comm.get_rank(self.group)

    @property
    def size(self) -> int:
        """The number of ranks of the ep group: e."""
        return comm.get_world_size(self.group)

    def span(self, num_experts: int) -> tuple[int, int]:
        """Return the first expert of this rank and the first expert of the next rank.

        Raises:
            ValueError: the experts do not divide among the ranks.
        """
        share = check_divides(num_experts, self.size)
        return self.rank * share, (self.rank + 1) * share
