"""`NamedTensors`: what crosses a boundary between stages when a stage returns a dictionary of tensors.

Chapter: book/pp/two-towers.  In: a dictionary.  Out: a tuple of its tensors that keeps their names.
  order     the dictionary's: gradients come back in that order, without the integers
  names     travel with shapes and types in the header of a boundary, once, not with every microbatch
  a module  gets the names as keyword arguments; a loss function gets the dictionary
Everything else in the runtime sees a tuple of tensors and needs no names.
Elsewhere: torch's `PipelineStage` sends tuples and refuses dictionaries; Megatron sends one tensor per boundary.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor


class NamedTensors(tuple[Tensor, ...]):
    """The tensors of a dictionary, in its order.

    Attributes:
        names: of the tensors.

    >>> import torch
    >>> NamedTensors({"x": torch.ones(1), "ids": torch.tensor([3])}).names
    ('x', 'ids')
    """

    names: tuple[str, ...]

    def __new__(cls, tensors: Mapping[str, Tensor]) -> "NamedTensors":
        """Keep the tensors and their names."""
        made = super().__new__(cls, tensors.values())
        made.names = tuple(tensors)
        return made

    def named(self) -> dict[str, Tensor]:
        """Return the dictionary."""
        return dict(zip(self.names, self, strict=True))


def names_of(tensors: tuple[Tensor, ...]) -> tuple[str, ...]:
    """Return the names of tensors: empty ones for a plain tuple."""
    return tensors.names if isinstance(tensors, NamedTensors) else ("",) * len(tensors)


def with_names(tensors: Iterable[Tensor], names: Iterable[str]) -> tuple[Tensor, ...]:
    """Return tensors under names, or as a plain tuple if the names are empty."""
    named = list(zip(names, tensors, strict=True))
    return NamedTensors(dict(named)) if any(name for name, _ in named) else tuple(tensor for _, tensor in named)


def call_with(function: Callable[..., Any], tensors: tuple[Tensor, ...], extra: Mapping[str, Any]) -> Any:
    """Call a module with a tuple as its arguments, or with a dictionary as its keyword arguments.

    Raises:
        ValueError: a tensor that arrives and an extra input have one name.
    """
    if not isinstance(tensors, NamedTensors):
        return function(*tensors, **extra)
    if twice := sorted(extra.keys() & set(tensors.names)):
        raise ValueError(f"a stage gets each name once, got {twice} from the stage before and as extra inputs")
    return function(**tensors.named(), **extra)


def output_of(tensors: tuple[Tensor, ...]) -> Any:
    """Return what a module has returned: a dictionary, a tuple, or a tensor alone."""
    if isinstance(tensors, NamedTensors):
        return tensors.named()
    return tensors if len(tensors) > 1 else tensors[0]
