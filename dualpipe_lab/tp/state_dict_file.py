"""One safetensors file with the whole model, written by and read on any number of tensor-parallel ranks.

Chapter: book/tp/block.  In: a model of this part, a path.  Out: a file, or the rank's parameters.
  save   tensor by tensor: joined on every rank, written by the first; memory for one whole tensor
  load   each rank reads its own part of each tensor, and no more; memory for the rank's parameters
For checkpoints with an optimizer see `dualpipe_lab.dp.checkpoint` and `dualpipe_lab.tp.shard.place_of`.
Elsewhere: Megatron dist_checkpointing; torch.distributed.checkpoint.
"""

import os
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.dp.checkpoint.file import write_tensors
from dualpipe_lab.tp.shard import Shard, load_whole, shards_of, whole_of


def save_whole_file(model: nn.Module, path: Path | str, group: Group | None = None) -> None:
    """Write all parameters, whole, into one file; all ranks of the group call this together.

    Args:
        model: any module of this part; replicated parameters are those of the group's first rank.
        path: of the file; it appears when it is complete.
        group: the ranks that share the model; with several such groups, let one of them call this.
    """
    path, shards, parameters = Path(path), shards_of(model), dict(model.named_parameters())

    def read(name: str) -> Tensor:
        return whole_of(parameters[name], shards.get(name), group)

    if comm.get_rank(group) == 0:
        kinds = {
            name: (value.dtype, shards[name].shape_of_whole(value) if name in shards else tuple(value.shape))
            for name, value in parameters.items()
        }
        hidden = path.with_name(path.name + ".part")
        write_tensors(hidden, kinds, read, {"format": "pt"})
        os.replace(hidden, path)
    else:
        for name in parameters:  # the first rank asks for the tensors in this order
            read(name)
    comm.barrier(group)


def load_whole_file(model: nn.Module, path: Path | str) -> None:
    """Fill the parameters of this rank from the file of a whole model, whatever the number of ranks that saved it.

    Raises:
        ValueError: a tensor is missing, left over, or of another shape; then no parameter has changed.
    """
    with safe_open(str(path), framework="pt") as file:
        wanted, present = {name for name, _ in model.named_parameters()}, set(file.keys())
        if wanted != present:
            raise ValueError(f"{path} differs from the model in {sorted(wanted ^ present)}; it is another model's")

        def read(name: str, shard: Shard | None) -> Tensor:
            rows = file.get_slice(name)
            shape = tuple(rows.get_shape())
            if shard is None:
                whole: Tensor = rows[:]
                return whole
            if len(shape) <= shard.axis or shape[shard.axis] != shard.size:
                raise ValueError(f"{path}: {name} has shape {shape}, needs {shard.size} along axis {shard.axis}")
            index = [slice(None)] * len(shape)
            index[shard.axis] = slice(shard.start, shard.stop)
            part: Tensor = rows[tuple(index)]
            return part

        load_whole(model, read)
