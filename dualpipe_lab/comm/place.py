"""Where this rank stands in a collective, and the checks that keep a bad call from hanging the others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dualpipe_lab.comm.groups import Group, carrier, members, name_of
from dualpipe_lab.comm.work import Work, check_contiguous, dtype_name, issue, num_bytes
from dualpipe_lab.world.context import rank_context
from dualpipe_lab.world.record import traffic
from dualpipe_lab.world.record.operation import Operation
from dualpipe_lab.world.record.traffic import Traffic

_REDUCTIONS = ("sum", "avg", "max", "min", "product")


@dataclass(frozen=True)
class Place:
    """A collective's name, its ranks, this rank's position among them, the group's name and the group that carries it.

    That is the caller's group, unless bytes on the wire are counted.
    """

    name: str
    ranks: tuple[int, ...]
    position: int
    group_name: str
    group: Group | None
    root: int | None = None

    @property
    def size(self) -> int:
        """Number of ranks that take part."""
        return len(self.ranks)

    def index(self, root: int) -> int:
        """Position of the global rank `root`; ValueError if it is not a member."""
        if root not in self.ranks:
            raise ValueError(f"{self.name}: rank {root} is not among the ranks {list(self.ranks)}")
        return self.ranks.index(root)

    def check_numel(self, what: str, tensor: torch.Tensor, expected: int) -> None:
        """Refuse a tensor of the wrong size before it reaches the other ranks."""
        if tensor.numel() != expected:
            raise ValueError(
                f"{self.name} over {self.size} ranks: {what} needs {expected} elements, got shape {tuple(tensor.shape)}"
            )

    def check_count(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse a list that does not hold one tensor per rank."""
        if len(tensors) != self.size:
            raise ValueError(
                f"{self.name} needs one tensor per rank in {what}, got {len(tensors)} for {self.size} ranks"
            )

    def addressed(self, sends: Sequence[int]) -> dict[int, int]:
        """Bytes of each member's block by its global rank; one's own does not travel."""
        return {
            rank: sent
            for place, (rank, sent) in enumerate(zip(self.ranks, sends, strict=True))
            if place != self.position
        }

    def block_bytes(self, what: str, tensor: torch.Tensor, splits: Sequence[int] | None) -> list[int]:
        """Bytes of each rank's block of rows; ValueError unless the blocks make up the tensor."""
        rows = tensor.shape[0] if tensor.dim() else 0
        if splits is None:
            if rows % self.size:
                raise ValueError(
                    f"{self.name}: {rows} rows of {what} do not divide among {self.size} ranks; pass {what}_split_sizes"
                )
            splits = [rows // self.size] * self.size
        if len(splits) != self.size or sum(splits) != rows:
            raise ValueError(
                f"{self.name}: {what}_split_sizes {list(splits)} must be {self.size} numbers that sum to {rows} rows"
            )
        row_bytes = num_bytes(tensor) // rows if rows else 0
        return [split * row_bytes for split in splits]


def place(name: str, group: Group | None, *tensors: torch.Tensor, root: int | None = None) -> Place:
    """Check the tensors of a collective and find this rank's place in it; `root` is a global rank."""
    check_contiguous(name, *tensors)
    ranks, group_name, rank = members(group), name_of(group), rank_context().rank
    return Place(name, ranks, ranks.index(rank), group_name, carrier(name, ranks, group_name, group), root)


def start(
    where: Place,
    moved: Traffic,
    tensor: torch.Tensor | None,
    begin: Callable[[], Any],
    async_op: bool,
    finish: Callable[[], None] | None = None,
    sent_to: dict[int, int] | None = None,
    tensor_bytes: int | None = None,
) -> Work | None:
    """Issue a collective whose shape in reports is that of `tensor`; `finish` runs when it is over.

    `sent_to`: whom its bytes go to, unless it is a ring in the order of the ranks.
    `tensor_bytes`: of the full tensor, where `tensor` is a part of it.
    """
    operation = Operation(where.name, where.ranks, moved, (), sent_to=sent_to, root=where.root)
    operation.group_name = where.group_name
    if tensor is not None:
        operation.shape, operation.dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        operation.tensor_bytes = num_bytes(tensor) if tensor_bytes is None else tensor_bytes
    return issue(operation, begin, async_op, finish)


def reduction(name: str) -> Any:
    """The operator of torch with this name; ValueError if there is none."""
    if name not in _REDUCTIONS:
        raise ValueError(f"a reduction is one of {', '.join(_REDUCTIONS)}, got {name!r}")
    return getattr(dist.ReduceOp, name.upper())


def even_chunks(tensor: torch.Tensor, size: int) -> list[int]:
    """Bytes of the chunks into which a ring cuts `tensor`, the ceiling first."""
    return [elements * tensor.element_size() for elements in traffic.split(tensor.numel(), size)]
