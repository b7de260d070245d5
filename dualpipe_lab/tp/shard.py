"""Which part of a whole parameter a rank holds; from one whole state to the ranks' parts, and back.

Chapter: book/tp/column-parallel.  In: modules that name their `shards`.  Out: parts, or whole tensors.
  part of rank r    elements r ceil(n / t) to (r + 1) ceil(n / t) of n: the last ranks may have fewer, or none
Weights are drawn whole, by name and seed, and then cut: every cut of a model starts from the same numbers, and the
scale is that of the whole layer.
Elsewhere: Megatron `set_tensor_model_parallel_attributes`; torch `DTensor` with `Shard(dim)`.
"""

import zlib
from collections.abc import Callable, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.dp.checkpoint.state import Place, PlaceOf


class Shard(NamedTuple):
    """Elements `start` to `stop` along `axis`, where the whole tensor has `size`.

    A part that several ranks hold is a copy on all of them but the first.
    """

    axis: int
    start: int
    stop: int
    size: int
    is_copy: bool = False

    def of(self, whole: Tensor) -> Tensor:
        """This part of the whole tensor, as a view.

        >>> Shard(axis=1, start=2, stop=3, size=3).of(torch.arange(6).view(2, 3)).tolist()
        [[2], [5]]
        """
        return whole.narrow(self.axis, self.start, self.stop - self.start)

    def shape_of_whole(self, part: Tensor) -> tuple[int, ...]:
        """The shape of the tensor that `part` is a part of."""
        return (*part.shape[: self.axis], self.size, *part.shape[self.axis + 1 :])


def shards_of(model: nn.Module) -> dict[str, Shard]:
    """The part that each cut parameter is; parameters that are not listed are replicated."""
    return {
        f"{prefix}.{name}" if prefix else name: shard
        for prefix, module in model.named_modules()
        for name, shard in getattr(module, "shards", {}).items()
    }


def place_of(model: nn.Module) -> PlaceOf:
    """Where parameters lie, for `dualpipe_lab.dp.checkpoint.save` and `load`: a checkpoint of any other cut will do."""
    shards = shards_of(model)

    def find(name: str, tensor: Tensor) -> Place:
        if name not in shards:
            return Place(name)
        return Place(name, shards[name].axis, shards[name].start, shards[name].size)

    return find


def load_whole(model: nn.Module, read: Callable[[str, Shard | None], Tensor]) -> None:
    """Fill the parameters of this rank.

    Args:
        model: any module of this part.
        read: gives a part of a whole parameter by its name; all of it for None.

    Raises:
        ValueError: a tensor of another shape, before any parameter has changed.
    """
    shards = shards_of(model)
    staged = {}
    for name, parameter in model.named_parameters():
        staged[name] = read(name, shards.get(name))
        if staged[name].shape != parameter.shape:
            raise ValueError(
                f"{name} needs shape {tuple(parameter.shape)} on this rank, got {tuple(staged[name].shape)}; "
                "the whole state is that of a layer of other sizes"
            )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(staged[name])


def load_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Fill the parameters of this rank from a whole state, `{name: whole tensor}`.

    Raises:
        ValueError: a tensor is missing, left over, or of another shape; then no parameter has changed.
    """
    wanted = {name for name, _ in model.named_parameters()}
    wanted |= {name for name in shards_of(model) if name in state}  # a tied parameter may come under both its names
    if wanted != set(state):
        raise ValueError(f"the whole state differs from the model in {sorted(wanted ^ set(state))}")

    def read(name: str, shard: Shard | None) -> Tensor:
        whole = state[name]
        if shard is not None and (whole.dim() <= shard.axis or whole.shape[shard.axis] != shard.size):
            raise ValueError(f"{name} has shape {tuple(whole.shape)}, needs {shard.size} along axis {shard.axis}")
        return whole if shard is None else shard.of(whole)

    load_whole(model, read)


def counted_gradients(model: nn.Module) -> list[tuple[Tensor, tuple[str, ...]]]:
    """This rank's gradients as `dualpipe_lab.dp.grad_norm.global_norm` takes them: each element of the whole once.

    Replicated gradients come without an axis, parts with "tp"; copies of a part are left out.
    """
    return [(p.grad, axes) for p, axes in norm_axes(model).items() if p.grad is not None and axes is not None]


def norm_axes(model: nn.Module) -> dict[nn.Parameter, tuple[str, ...] | None]:
    """The axes along which other ranks have other parts of a parameter; None for a copy that another rank counts."""
    shards = shards_of(model)
    found: dict[nn.Parameter, tuple[str, ...] | None] = {}
    for name, parameter in model.named_parameters():
        shard = shards.get(name)
        is_copy = shard is not None and shard.is_copy
        found[parameter] = None if is_copy else () if shard is None else ("tp",)
    return found


def whole_of(part: Tensor, shard: Shard | None, group: Group | None = None) -> Tensor:
    """The whole tensor on every rank of the group, from each rank's part; replicas of a part must be equal."""
    part = part.detach()
    if shard is None:
        return part.clone()
    shards = [Shard(*fields) for fields in comm.all_gather_object(tuple(shard), group)]
    shape = shard.shape_of_whole(part)
    longest = prod(shape) // shard.size * max(other.stop - other.start for other in shards)
    padded = part.new_zeros(longest)  # collectives want equal sizes
    padded[: part.numel()] = part.reshape(-1)
    rows = part.new_empty(len(shards), longest)
    comm.all_gather_single(rows.view(-1), padded, group)
    whole = part.new_empty(shape)
    for other, values in zip(shards, rows, strict=True):
        target = other.of(whole)
        target.copy_(values[: target.numel()].view(target.shape))
    return whole


def whole_state(model: nn.Module, group: Group | None = None, of: str = "parameter") -> dict[str, Tensor]:
    """Every parameter, or every gradient, whole on every rank.

    Args:
        model: any module of this part.
        group: the ranks that share it.
        of: "parameter" or "grad"; a parameter without a gradient is left out.
    """
    shards = shards_of(model)
    tensors = {name: parameter if of == "parameter" else parameter.grad for name, parameter in model.named_parameters()}
    return {name: whole_of(tensor, shards.get(name), group) for name, tensor in tensors.items() if tensor is not None}


def initialise(model: nn.Module, seed: int = 0) -> None:
    """Draw every parameter by its name: matrices with standard deviation 1 / sqrt(columns of the whole), norms 1.

    Biases become 0.
    """
    shards = shards_of(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            shard = shards.get(name)
            shape = tuple(parameter.shape) if shard is None else shard.shape_of_whole(parameter)
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            whole = torch.randn(shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5
            parameter.copy_(whole if shard is None else shard.of(whole))
