"""Sharding a sequence: `shard_sequence` selects a rank's positions, `unshard_sequence` gathers the full tensor.

Chapter: book/cp/ring-attention.  In: a tensor with an axis of positions, a layout.  Out: this rank's shard.
  bytes sent    shard 0 (every rank has the full tensor); unshard (c - 1) / c * S, a ring all-gather
Whatever depends on a position must follow the layout.  RoPE takes `positions`.  Labels are shifted before sharding: the
label of a rank's last token is the next token of the sequence, which another rank may hold.
Elsewhere: torch `context_parallel(buffers=, buffer_seq_dims=)`, `context_parallel_unshard`.
"""

import torch
from torch import Tensor

from dualpipe_lab.comm.groups import Group
from dualpipe_lab.cp.layouts import SequenceLayout
from dualpipe_lab.cp.ring import Ring, ring_all_gather
from dualpipe_lab.dp.data_parallel import IGNORE_INDEX
from dualpipe_lab.launch.context import device as lab_device


def positions(layout: SequenceLayout, rank: int, device: torch.device | str | None = None) -> Tensor:
    """Return the positions that a rank of the ring holds as an index tensor, for RoPE and masks.

    `device`: where they are used (default: that of the calling rank).
    """
    return torch.tensor(layout.positions(rank), dtype=torch.int64, device=device or lab_device())


def shard_sequence(x: Tensor, layout: SequenceLayout, rank: int, dim: int = 1) -> Tensor:
    """Return a rank's shard of a full tensor, in the order of its positions.

    >>> from dualpipe_lab.cp.layouts import make_layout
    >>> shard_sequence(torch.arange(8), make_layout("zigzag", 8, 2), rank=0, dim=0).tolist()
    [0, 1, 6, 7]

    Raises:
        ValueError: an axis whose length is not that of the layout.
    """
    if x.shape[dim] != layout.length:
        raise ValueError(f"{layout} cannot shard axis {dim} of {tuple(x.shape)}; make it for {x.shape[dim]}")
    local: Tensor = x.index_select(dim, positions(layout, rank, x.device))
    return local


def unshard_sequence(x: Tensor, layout: SequenceLayout, dim: int = 1, group: Group | None = None) -> Tensor:
    """Return the full tensor on every rank, gathered from all shards; every rank of the group must call this.

    Raises:
        ValueError: a shard whose length is not what the layout gives this rank, or a layout for another number of
            ranks.
    """
    ring = Ring(group)
    check_local_shard(x, layout, ring, dim)
    rest = x.movedim(dim, 0).shape[1:]
    shards = [x.new_empty(layout.size(rank), *rest) for rank in range(ring.size)]
    shards[ring.position].copy_(x.detach().movedim(dim, 0))
    ring_all_gather(shards, ring, ring.position)
    full = x.new_empty(layout.length, *rest)
    for rank, local in enumerate(shards):
        full[positions(layout, rank, x.device)] = local
    return full.movedim(0, dim)


def check_local_shard(x: Tensor, layout: SequenceLayout, ring: Ring, dim: int) -> None:
    """Refuse a tensor whose length is not what the layout gives this rank."""
    if layout.num_ranks != ring.size:
        raise ValueError(f"{layout} is used by a group of {ring.size} ranks; make the layout for {ring.size}")
    if x.shape[dim] != layout.size(ring.position):
        raise ValueError(
            f"rank {ring.position} of the ring holds {layout.size(ring.position)} positions of {layout}, got "
            f"{x.shape[dim]} in axis {dim} of {tuple(x.shape)}; use shard_sequence(x, layout, rank={ring.position})"
        )


def next_token_labels(tokens: Tensor) -> Tensor:
    """Return the labels of a full sequence: for each token the next one, -100 for the last.

    Call it before `shard_sequence`.

    >>> next_token_labels(torch.tensor([[5, 6, 7]])).tolist()
    [[6, 7, -100]]
    """
    labels = torch.full_like(tokens, IGNORE_INDEX)
    labels[..., :-1] = tokens[..., 1:]
    return labels
