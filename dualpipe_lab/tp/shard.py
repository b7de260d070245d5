"""The ranks that share layers, and the shard of a full parameter that each holds; from one full state dict, and back.

Chapter: book/tp/column-parallel.  In: a process group of t ranks; modules that name their `shards`.  Out: the argument
`tp` of every layer of this part; filled shards, or full tensors.
  shard of rank r    elements r ceil(n / t) to (r + 1) ceil(n / t) of n: the last ranks may have fewer, or none
Weights are drawn in full, by name and seed, and then sharded: every way of sharding a model starts from the same
numbers, and their scale is that of the full layer.
Elsewhere: Megatron `ModelParallelConfig`, `set_tensor_model_parallel_attributes`; torch `parallelize_module(module,
mesh, plan)`, `DTensor` with `Shard(dim)`, `DTensor.full_tensor`.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group
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


def ranks_of(tp: TensorParallel | None) -> TensorParallel:
    """Return a layer's argument `tp`, the world for None; TypeError for a bare group or anything else."""
    if not isinstance(tp, TensorParallel | None):
        raise TypeError(f"tp is a TensorParallel, got {type(tp).__name__}; pass tp=TensorParallel(group)")
    return tp or TensorParallel()


class Shard(NamedTuple):
    """Elements `start` to `stop` along `axis` of a full tensor that has `size` elements there.

    Of a shard that several ranks hold, all but the first are marked `is_replica`.  `mesh_axis` is the axis of the mesh
    whose ranks hold the other shards.
    """

    axis: int
    start: int
    stop: int
    size: int
    is_replica: bool = False
    mesh_axis: str = "tp"

    @property
    def is_full(self) -> bool:
        """Whether the shard is the full tensor."""
        return self.stop - self.start == self.size

    def of(self, full: Tensor) -> Tensor:
        """Return this shard of the full tensor, as a view.

        >>> Shard(axis=1, start=2, stop=3, size=3).of(torch.arange(6).view(2, 3)).tolist()
        [[2], [5]]
        """
        return full.narrow(self.axis, self.start, self.stop - self.start)

    def fill(self, full: Tensor, values: Tensor) -> None:
        """Write this shard's values, flat and perhaps padded at their end, into the full tensor."""
        target = self.of(full)
        target.copy_(values[: target.numel()].view(target.shape))

    def full_shape(self, local: Tensor) -> tuple[int, ...]:
        """Return the shape of the full tensor, given this rank's shard of it."""
        return (*local.shape[: self.axis], self.size, *local.shape[self.axis + 1 :])


def shards_of(model: nn.Module) -> dict[str, Shard]:
    """Return the shard of each sharded parameter, by name; all other parameters are replicated."""
    return {
        f"{prefix}.{name}" if prefix else name: shard
        for prefix, module in model.named_modules()
        for name, shard in declared_shards(module).items()
    }


def declared_shards(layer: nn.Module) -> Mapping[str, Shard]:
    """Return the shards that a layer names; none for a module that has something else under that name, or nothing."""
    shards = getattr(layer, "shards", None)
    return shards if isinstance(shards, Mapping) else {}


def load_shards(model: nn.Module, read: Callable[[str, Shard | None], Tensor]) -> None:
    """Fill this rank's parameters with shards that a function reads.

    Args:
        model: any module of this part.
        read: returns the shard of a parameter, given the parameter's name; the full tensor for the shard None.

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
                "the full state dict is that of a layer of other sizes"
            )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(staged[name])


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Fill this rank's parameters with their shards of a full state dict, `{name: full tensor}`.

    Raises:
        ValueError: a tensor is missing, left over, or of another shape; then no parameter has changed.
    """
    wanted = {name for name, _ in model.named_parameters()}
    wanted |= {name for name in shards_of(model) if name in state}  # a tied parameter may come under both its names
    if wanted != set(state):
        raise ValueError(f"the full state dict differs from the model in {sorted(wanted ^ set(state))}")

    def read(name: str, shard: Shard | None) -> Tensor:
        full = state[name]
        if shard is not None and (full.dim() <= shard.axis or full.shape[shard.axis] != shard.size):
            raise ValueError(f"{name} has shape {tuple(full.shape)}, needs {shard.size} along axis {shard.axis}")
        return full if shard is None else shard.of(full)

    load_shards(model, read)


def full_state_dict(model: nn.Module, group: Group | None = None, of: str = "parameter") -> dict[str, Tensor]:
    """Gather every parameter, or every gradient, in full on every rank.

    Args:
        model: any module of this part.
        group: the ranks that share it.
        of: "parameter" or "grad"; a parameter without a gradient is left out.
    """
    shards = shards_of(model)
    tensors = {name: parameter if of == "parameter" else parameter.grad for name, parameter in model.named_parameters()}
    return {
        name: full_tensor(tensor, shards.get(name), group) for name, tensor in tensors.items() if tensor is not None
    }


def full_tensor(local: Tensor, shard: Shard | None, group: Group | None = None) -> Tensor:
    """Gather the full tensor on every rank of the group from the ranks' shards; replicas of a shard must be equal."""
    local = local.detach()
    if shard is None:
        return local.clone()
    shards = [Shard(*fields) for fields in comm.all_gather_object(tuple(shard), group)]
    shape = shard.full_shape(local)
    longest = prod(shape) // shard.size * max(other.stop - other.start for other in shards)
    padded = local.new_zeros(longest)  # collectives need equal sizes
    padded[: local.numel()] = local.reshape(-1)
    rows = local.new_empty(len(shards), longest)
    comm.all_gather_single(rows.view(-1), padded, group)
    full = local.new_empty(shape)
    for other, values in zip(shards, rows, strict=True):
        other.fill(full, values)
    return full


def initialize_parameters(model: nn.Module, seed: int = 0) -> None:
    """Draw every parameter by its name: matrices with standard deviation 1 / sqrt(full number of columns).

    Weights of norms become 1, biases 0.
    """
    shards = shards_of(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            shard = shards.get(name)
            full = drawn(name, tuple(parameter.shape) if shard is None else shard.full_shape(parameter), seed)
            parameter.copy_(full if shard is None else shard.of(full))


def drawn(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the full matrix that belongs to a name and a seed, with standard deviation 1 / sqrt(columns)."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5
