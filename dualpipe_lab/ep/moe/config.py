"""`ExpertParallel`: the ranks that share out the experts of a layer, and those that hold copies of the same ones.

Chapter: book/ep/smoe.  In: process groups, or a mesh that has them.  Out: what every layer of this part is given.
  experts of rank r    r E / e to (r + 1) E / e
Elsewhere: Megatron `expert_model_parallel_size` and `expert_data_parallel_group`; torchtitan `ExpertParallel`.
"""

from dataclasses import dataclass

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.world.mesh import Mesh


@dataclass(frozen=True)
class ExpertParallel:
    """How ranks share the experts; the layers of one model are given the same one.

    Attributes:
        group: the ranks that have all experts between them (default: the world).
        copies: the ranks that hold the same experts as this one, itself included; None: it is the only one.
    """

    group: Group | None = None
    copies: Group | None = None

    @classmethod
    def of(cls, mesh: Mesh) -> "ExpertParallel":
        """The `ep` and `edp` groups of a mesh; every rank of the world comes to this, in the same order.

        Without an `ep` axis or `edp=`, every rank has all experts, and the ranks with other data have copies.
        """
        topology = mesh.topology
        copies = "edp" if topology.edp or "ep" in topology.names else "data"
        return cls(mesh.group("ep"), mesh.group(copies) if topology.size(copies) > 1 else None)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return comm.get_rank(self.group)

    @property
    def size(self) -> int:
        """Ranks of the group: e."""
        return comm.get_world_size(self.group)

    def span(self, num_experts: int) -> tuple[int, int]:
        """The first expert of this rank, and the first of the next.

        Raises:
            ValueError: the experts do not divide among the ranks.
        """
        share = check_divides(num_experts, self.size)
        return self.rank * share, (self.rank + 1) * share


def check_divides(num_experts: int, ep_size: int) -> int:
    """How many experts each rank has; call this before any process starts.

    >>> check_divides(8, 4)
    2

    Raises:
        ValueError: the experts do not divide among the ranks.
    """
    if num_experts < 1 or num_experts % ep_size:
        sizes = [size for size in range(1, num_experts + 1) if num_experts % size == 0]
        raise ValueError(
            f"experts must divide among the ranks, got {num_experts} experts on {ep_size} ranks; "
            f"use {', '.join(map(str, sizes))} ranks, or {-(-max(num_experts, 1) // ep_size) * ep_size} experts"
        )
    return num_experts // ep_size
