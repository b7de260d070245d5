"""Files: one safetensors file with the full state dict, and where a rank's shards lie in a checkpoint of `dp`.

Chapter: book/tp/block.  In: a model of this part, a path.  Out: a file, or this rank's parameters.
  save   tensor by tensor: gathered on every rank, written by the first; memory for one full tensor
  load   each rank reads its shard of each tensor alone; memory for this rank's parameters
The file may be loaded on any number of tensor-parallel ranks.  `dualpipe_lab.dp.checkpoint` saves the optimizer's state
too; it takes `shard_spec_of(model)`.
Elsewhere: Megatron dist_checkpointing; torch.distributed.checkpoint.
"""

import os
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.dp.checkpoint.file import write_tensors
from dualpipe_lab.dp.checkpoint.state import ShardSpec, ShardSpecOf
from dualpipe_lab.tp.shard import Shard, full_tensor, load_shards, shards_of


def save_state_dict_file(model: nn.Module, path: Path | str, group: Group | None = None) -> None:
    """Write the full state dict into one safetensors file; all ranks of the group call this together.

    Args:
        model: any module of this part; replicated parameters are those of the group's first rank.
        path: of the file; it appears when it is complete.
        group: the ranks that share the model; with several such groups, let one of them call this.
    """
    path, shards, parameters = Path(path), shards_of(model), dict(model.named_parameters())

    def read(name: str) -> Tensor:
        return full_tensor(parameters[name], shards.get(name), group)

    if comm.get_rank(group) == 0:
        kinds = {
            name: (value.dtype, shards[name].full_shape(value) if name in shards else tuple(value.shape))
            for name, value in parameters.items()
        }
        hidden = path.with_name(path.name + ".part")
        write_tensors(hidden, kinds, read, {"format": "pt"})
        os.replace(hidden, path)
    else:
        for name in parameters:  # the first rank reads the tensors in this order
            read(name)
    comm.barrier(group)


def load_state_dict_file(model: nn.Module, path: Path | str) -> None:
    """Fill this rank's parameters from the file of a full state dict, saved on any number of ranks.

    Raises:
        ValueError: a tensor is missing, left over, or of another shape; then no parameter has changed.
    """
    with safe_open(str(path), framework="pt") as file:
        wanted, present = {name for name, _ in model.named_parameters()}, set(file.keys())
        if wanted != present:
            raise ValueError(f"{path} differs from the model in {sorted(wanted ^ present)}; it is another model's")

        def read(name: str, shard: Shard | None) -> Tensor:
            stored = file.get_slice(name)
            shape = tuple(stored.get_shape())
            if shard is None:
                full: Tensor = stored[:]
                return full
            if len(shape) <= shard.axis or shape[shard.axis] != shard.size:
                raise ValueError(f"{path}: {name} has shape {shape}, needs {shard.size} along axis {shard.axis}")
            index = [slice(None)] * len(shape)
            index[shard.axis] = slice(shard.start, shard.stop)
            local: Tensor = stored[tuple(index)]
            return local

        load_shards(model, read)


def shard_spec_of(model: nn.Module) -> ShardSpecOf:
    """Return a function that says where a parameter lies in the full model, for `dp.checkpoint.save` and `load`.

    With it a checkpoint can be loaded under any other way of sharding.
    """
    shards = shards_of(model)

    def find(name: str, tensor: Tensor) -> ShardSpec:
        if name not in shards:
            return ShardSpec(name)
        return ShardSpec(name, shards[name].axis, shards[name].start, shards[name].size)

    return find
