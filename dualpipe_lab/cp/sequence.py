"""Sharding a sequence: a rank's positions of any tensor, and the whole again; labels are shifted before, not after.

Chapter: book/cp/ring-attention.  In: a tensor with an axis of positions, a layout.  Out: this rank's part.
  bytes sent    shard 0 (every rank has the whole); unshard (c - 1) / c * S, a ring of parts
Whatever depends on a position must follow the layout: RoPE takes `positions`, and the label of a rank's last token is
the token after it in the sequence, which another rank may hold.
Elsewhere: torch `context_parallel(buffers=, buffer_seq_dims=)`, `context_parallel_unshard`.
"""

import torch
from torch import Tensor

from dualpipe_lab.comm.groups import Group
from dualpipe_lab.cp.layouts import SequenceLayout
from dualpipe_lab.cp.ring import Ring
from dualpipe_lab.cp.ring_all_reduce import ring_all_gather
from dualpipe_lab.dp.data_parallel import IGNORED


def positions(layout: SequenceLayout, rank: int, device: torch.device | str = "cpu") -> Tensor:
    """The positions that a rank of the ring holds, as indices: for RoPE and masks."""
    return torch.tensor(layout.positions(rank), dtype=torch.int64, device=device)


def shard(x: Tensor, layout: SequenceLayout, rank: int, dim: int = 1) -> Tensor:
    """A rank's part of a sequence, in the order of its positions.

    >>> from dualpipe_lab.cp.layouts import make_layout
    >>> shard(torch.arange(8), make_layout("zigzag", 8, 2), rank=0, dim=0).tolist()
    [0, 1, 6, 7]

    Raises:
        ValueError: an axis of another length than the layout's.
    """
    if x.shape[dim] != layout.length:
        raise ValueError(f"{layout} cannot deal out axis {dim} of {tuple(x.shape)}; make it for {x.shape[dim]}")
    part: Tensor = x.index_select(dim, positions(layout, rank, x.device))
    return part


def unshard(x: Tensor, layout: SequenceLayout, dim: int = 1, group: Group | None = None) -> Tensor:
    """The whole sequence on every rank, from every rank's part; every rank of the group must call this.

    Raises:
        ValueError: a part of another length than the layout gives this rank, or another number of ranks.
    """
    ring = Ring(group)
    check_part(x, layout, ring, dim)
    rest = x.movedim(dim, 0).shape[1:]
    parts = [x.new_empty(layout.size(rank), *rest) for rank in range(ring.size)]
    parts[ring.position].copy_(x.detach().movedim(dim, 0))
    ring_all_gather(parts, ring, ring.position)
    whole = x.new_empty(layout.length, *rest)
    for rank, part in enumerate(parts):
        whole[positions(layout, rank, x.device)] = part
    return whole.movedim(0, dim)


def check_part(x: Tensor, layout: SequenceLayout, ring: Ring, dim: int) -> None:
    """Refuse a tensor that is not this rank's part.

    Raises:
        ValueError: naming the rank of the ring, its length and the layout's.
    """
    if layout.num_ranks != ring.size:
        raise ValueError(f"{layout} is used by a group of {ring.size} ranks; make the layout for {ring.size}")
    if x.shape[dim] != layout.size(ring.position):
        raise ValueError(
            f"rank {ring.position} of the ring holds {layout.size(ring.position)} positions of {layout}, got "
            f"{x.shape[dim]} in axis {dim} of {tuple(x.shape)}; use shard(x, layout, rank={ring.position})"
        )


def next_token_labels(tokens: Tensor) -> Tensor:
    """The label of every token of a whole sequence: the next token, and none for the last; before sharding.

    >>> next_token_labels(torch.tensor([[5, 6, 7]])).tolist()
    [[6, 7, -100]]
    """
    labels = torch.full_like(tokens, IGNORED)
    labels[..., :-1] = tokens[..., 1:]
    return labels
