"""`TensorParallel`: the ranks that share a layer, and how they share it.

Chapter: book/tp/column-parallel.  In: a process group of t ranks.  Out: the argument `tp` of every layer of this part.
Elsewhere: Megatron `ModelParallelConfig`; torch `parallelize_module(module, mesh, plan)`.
"""

from dataclasses import dataclass

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group, members
from dualpipe_lab.sharding import shard_slice


@dataclass(frozen=True)
class TensorParallel:
    """How a group of ranks shares its layers; all layers of one model are given the same one.

    Attributes:
        group: the ranks (default: the world).
        sequence_parallel: between the layers, each rank holds its shard of the tokens instead of all of them.
        regather: under sequence parallelism, keep the shard of a layer's input and gather the input again in the
            backward (10 half sums of bytes per layer); False keeps the full input (8, and more memory).
        overlap: compute dW while the sum of dX travels; False waits for the sum first.
        coalesce: leave the gradients of replicated weights partial (norms under sequence parallelism, replicated key
            and value heads); `sum_partial_gradients` sums them in one message per step.
    """

    group: Group | None = None
    sequence_parallel: bool = False
    regather: bool = True
    overlap: bool = True
    coalesce: bool = False

    @property
    def rank(self) -> int:
        """This rank's number within the group: tp_rank."""
        return comm.get_rank(self.group)

    @property
    def size(self) -> int:
        """The number of ranks in the group: tp_size, or t in formulas."""
        return comm.get_world_size(self.group)

    def span(self, length: int) -> tuple[int, int]:
        """Return start and stop of this rank's shard of `length` elements; the last shards may be shorter, or empty."""
        part = shard_slice(length, self.size, self.rank)
        return part.start, part.stop

    def neighbours(self, num_ranks: int) -> Group:
        """Make a group of `num_ranks` consecutive ranks, this rank among them.

        All ranks of the tp group call this, in the same order as they make their other groups.

        Raises:
            ValueError: the ranks do not divide into such groups.
        """
        if self.size % num_ranks:
            raise ValueError(f"{self.size} ranks do not divide into groups of {num_ranks}")
        first = self.rank // num_ranks * num_ranks
        return comm.new_group(members(self.group)[first : first + num_ranks], members_only=True)
