"""What crosses a boundary: number, shapes and types of the tensors, which a receiver must know to make a buffer.

Chapter: book/pp/pp-basic.  In: tensors, or an example of them.  Out: a `Spec`, also as a tensor that can be sent.
Where nobody says what crosses, it is negotiated (see `negotiation`).
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from dualpipe_lab.pp.runtime.stage import Tensors

Spec: TypeAlias = tuple[tuple[tuple[int, ...], torch.dtype], ...]
Boundary: TypeAlias = Tensor | Tensors | Callable[[int], Tensor | Tensors]

MAX_TENSORS = 7  # at one boundary
_MAX_DIMS = 8
_FIELDS = 2 + _MAX_DIMS  # type, number of dimensions, dimensions
HEADER_LENGTH = 1 + MAX_TENSORS * _FIELDS
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8,
          torch.bool, torch.complex64, torch.complex128, torch.int8, torch.int16)  # fmt: skip


def spec_of(tensors: Sequence[Tensor]) -> Spec:
    """Return shapes and types of tensors."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def gradients_of(spec: Spec) -> Spec:
    """Return shapes and types of the gradients that come back: integers have none."""
    return tuple((shape, dtype) for shape, dtype in spec if dtype.is_floating_point or dtype.is_complex)


def write(spec: Spec) -> str:
    """Write a spec for a message: `(3, 4) of torch.float64`."""
    return ", ".join(f"{shape} of {dtype}" for shape, dtype in spec)


def to_header(spec: Spec) -> Tensor:
    """Return a spec as a tensor of `HEADER_LENGTH` integers; ValueError if it is too large for one."""
    if len(spec) > MAX_TENSORS or any(len(shape) > _MAX_DIMS or dtype not in _TYPES for shape, dtype in spec):
        raise ValueError(
            f"a boundary carries at most {MAX_TENSORS} tensors of at most {_MAX_DIMS} dimensions, got {write(spec)}"
        )
    header = torch.zeros(HEADER_LENGTH, dtype=torch.int64)
    header[0] = len(spec)
    for number, (shape, dtype) in enumerate(spec):
        fields = torch.tensor([_TYPES.index(dtype), len(shape), *shape])
        header[1 + number * _FIELDS :][: len(fields)] = fields
    return header


def from_header(header: Tensor) -> Spec:
    """Return the spec that `to_header` wrote.

    >>> from_header(to_header((((3, 4), torch.float32),)))
    (((3, 4), torch.float32),)
    """
    count, *fields = header.tolist()
    parts = [fields[number * _FIELDS : (number + 1) * _FIELDS] for number in range(count)]
    return tuple((tuple(shape[:dims]), _TYPES[kind]) for kind, dims, *shape in parts)


class Shapes(Protocol):
    """Who knows what crosses the boundary behind a stage."""

    def known(self, stage: int, microbatch: int) -> Spec | None:
        """What stage `stage` sends on; None if this rank cannot tell yet."""

    def learn(self, stage: int, microbatch: int) -> Spec:
        """On the receiving side: the same, after reading the messages that say so."""

    def announce(self, stage: int, microbatch: int, made: Spec) -> None:
        """On the sending side: tell the receiver if it cannot know; ValueError if it expects something else."""


class Given:
    """Shapes as the caller says: one example for all boundaries, or a function from the microbatch to one."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self._always = None if callable(boundary) else _spec_of_example(boundary)

    def known(self, stage: int, microbatch: int) -> Spec:
        """What every stage sends on."""
        if self._always is None:
            assert callable(self._boundary)
            return _spec_of_example(self._boundary(microbatch))
        return self._always

    learn = known

    def announce(self, stage: int, microbatch: int, made: Spec) -> None:
        """Refuse what the other side has no buffer for."""
        if made != (known := self.known(stage, microbatch)):
            raise ValueError(
                f"stage {stage} made {write(made)} for microbatch {microbatch}, the boundary says {write(known)}; "
                "leave out `boundary` to have it negotiated"
            )


def _spec_of_example(example: Tensor | Tensors) -> Spec:
    return spec_of(example if isinstance(example, tuple) else (example,))
