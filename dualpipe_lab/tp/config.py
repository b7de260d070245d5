"""`TensorParallel`: the ranks that share a layer, and how they share it.

Chapter: book/tp/column-parallel.  In: a process group of t ranks.  Out: what every layer of this part is given.
Elsewhere: Megatron `ModelParallelConfig`; torch `parallelize_module(module, mesh, plan)`.
"""

from dataclasses import dataclass

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group, members
from dualpipe_lab.dp.layout import share


@dataclass(frozen=True)
class TensorParallel:
    """How a group of ranks shares its layers; the layers of one model are given the same one.

    Attributes:
        group: the ranks (default: the world).
        sequence_parallel: between the layers, each rank holds its part of the tokens instead of all of them.
        regather: under sequence parallelism, keep the rank's part of a layer's input and gather it again in the
            backward (10 collectives' worth of bytes per layer); False keeps the whole input (8, and more memory).
        overlap: the sum of dX travels while dW is computed; False waits for it first.
        coalesce: leave partial the gradients of replicated weights (norms under sequence parallelism, shared key and
            value heads), for `sum_partial_gradients` to sum in one message per step.
    """

    group: Group | None = None
    sequence_parallel: bool = False
    regather: bool = True
    overlap: bool = True
    coalesce: bool = False

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return comm.get_rank(self.group)

    @property
    def size(self) -> int:
        """Ranks of the group: t."""
        return comm.get_world_size(self.group)

    def span(self, size: int) -> tuple[int, int]:
        """Where this rank's part of `size` things begins and ends; the last ranks may have fewer, or none."""
        part = share(size, self.size, self.rank)
        return part.start, part.stop

    def neighbours(self, num_ranks: int) -> Group:
        """A new group of this rank and its neighbours: the ranks in consecutive groups of `num_ranks`.

        All ranks of the group call this, in the same order as their other groups.

        Raises:
            ValueError: the ranks do not divide into such groups.
        """
        if self.size % num_ranks:
            raise ValueError(f"{self.size} ranks do not divide into groups of {num_ranks}")
        first = self.rank // num_ranks * num_ranks
        return comm.new_group(members(self.group)[first : first + num_ranks], members_only=True)
