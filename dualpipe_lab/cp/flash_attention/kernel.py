"""The two loops of FlashAttention-2: over tiles of queries, and for each over the tiles of keys that it sees.

Chapter: book/cp/flash-attention.  In: one block of queries and one of keys.  Out: O and LSE = m + ln l; dQ, dK, dV.
  forward   m, l and A = sum exp(s - m) v are rescaled tile by tile; O = A / l once, at the end
  backward  P = exp(S - LSE),  D = rowsum(dO * O) = rowsum(P * dP),  dS = P * (dP - D)
            dQ = c dS K,  dK = c dS^T Q,  dV = P^T dO                  with dP = dO V^T and the scale c
LSE and D of all keys make P and dS of any part of the keys right: this is what ring attention builds on.
Source: Dao 2023 (arXiv 2307.08691), algorithms 1 and 2.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dualpipe_lab.cp.flash_attention.heads import grouped, rows_of
from dualpipe_lab.cp.online_softmax import MaxSum
from dualpipe_lab.cp.softmax import NOTHING, accumulate_in, reference

Grads = tuple[Tensor, Tensor, Tensor]


class Kernel(Protocol):
    """Attention of one block of queries to one block of keys, as ring attention calls it.

    `offset` None: every query sees every key; else query i sees the keys up to i + offset, and ring attention asks for
    0 alone.  `out` and `lse` of the backward are those of all keys, not of this block.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, offset: int | None, scale: float) -> tuple[Tensor, Tensor]:
        """Return `out_BHSD` and `lse_BHS`."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, offset: int | None, scale: float
    ) -> Grads:
        """Return the gradients of q, k, v."""
        ...


class Columns(NamedTuple):
    """Some keys, and which of them each query of a tile does not see (None: it sees all)."""

    keys: slice
    hidden: Tensor | None


@dataclass(frozen=True)
class FlashTiles:
    """The kernel in plain torch: tiles of `num_queries` x `num_keys` scores, of all heads at once.

    Sums are kept in fp32 for 16-bit inputs, and results come in that type.

    Raises:
        ValueError: empty tiles.
    """

    num_queries: int = 256
    num_keys: int = 256

    def __post_init__(self) -> None:
        if min(self.num_queries, self.num_keys) < 1:
            raise ValueError(f"a tile holds at least 1 query and 1 key, got {self.num_queries} x {self.num_keys}")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, offset: int | None, scale: float) -> tuple[Tensor, Tensor]:
        """Return `out_BHSD` and `lse_BHS`; arguments as in `Kernel`."""
        wide = accumulate_in(q.dtype)
        q_groups, k_all, v_all = grouped(q, k.shape[1]), k.flatten(0, 1).to(wide), v.flatten(0, 1).to(wide)
        out, lse = (torch.empty(q_groups.shape[:axes], dtype=wide, device=q.device) for axes in (4, 3))
        tile = _Buffer(q_groups, self, k.shape[2])
        for rows in self._rows(q.shape[2]):
            q_i = rows_of(q_groups, rows).to(wide) * scale
            state, weighted = _one_row_of_tiles(q_i, k_all, v_all, self.columns(rows, k.shape[2], offset), tile)
            weighted.div_(state.total.masked_fill(state.total == 0, 1)[..., None])
            out[:, :, rows], lse[:, :, rows] = (
                found.unflatten(1, (q_groups.shape[1], rows.stop - rows.start)) for found in (weighted, state.lse)
            )
        return out.view(q.shape), lse.view(q.shape[:3])

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, offset: int | None, scale: float
    ) -> Grads:
        """Return the gradients of q, k, v; arguments as in `Kernel`."""
        wide, kv_heads = accumulate_in(q.dtype), k.shape[1]
        k_all, v_all = k.flatten(0, 1).to(wide), v.flatten(0, 1).to(wide)
        dk, dv = torch.zeros_like(k_all), torch.zeros_like(v_all)
        q_groups, grad_groups = grouped(q, kv_heads), grouped(grad, kv_heads)
        delta = grouped((grad.to(wide) * out).sum(-1), kv_heads)  # D
        # a query that sees nothing: exp(s - inf) = 0 for every key
        lse_groups = grouped(lse.masked_fill(lse == NOTHING, float("inf")), kv_heads)
        dq = torch.empty(q_groups.shape, dtype=wide, device=q.device)
        tile, tile_grad = (_Buffer(q_groups, self, k.shape[2]) for _ in range(2))
        for rows in self._rows(q.shape[2]):
            q_i, do_i = rows_of(q_groups, rows).to(wide) * scale, rows_of(grad_groups, rows).to(wide)
            lse_i, delta_i = (rows_of(x, rows)[..., None] for x in (lse_groups, delta))
            dq_i = torch.zeros_like(q_i)
            for keys, hidden in self.columns(rows, k.shape[2], offset):
                k_j, v_j = k_all[:, keys], v_all[:, keys]
                p = _scores(q_i, k_j, hidden, tile).sub_(lse_i).exp_()
                dv[:, keys].baddbmm_(p.transpose(1, 2), do_i)
                ds = tile_grad.product(do_i, v_j).sub_(delta_i).mul_(p)
                dq_i.baddbmm_(ds, k_j)
                dk[:, keys].baddbmm_(ds.transpose(1, 2), q_i)  # q_i carries the scale
            dq[:, :, rows] = dq_i.mul_(scale).unflatten(1, (q_groups.shape[1], rows.stop - rows.start))
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)

    def columns(self, rows: slice, num_keys: int, offset: int | None) -> Iterator[Columns]:
        """The tiles of keys that some queries see; what none of them sees is not computed."""
        for first in range(0, num_keys, self.num_keys):
            keys = slice(first, min(first + self.num_keys, num_keys))
            if offset is None or keys.stop - 1 <= rows.start + offset:
                yield Columns(keys, None)
            elif first <= rows.stop - 1 + offset:
                ones = torch.ones(rows.stop - rows.start, keys.stop - keys.start, dtype=torch.bool)
                yield Columns(keys, ones.triu(rows.start + offset - first + 1))

    def _rows(self, num_queries: int) -> Iterator[slice]:
        for first in range(0, num_queries, self.num_queries):
            yield slice(first, min(first + self.num_queries, num_queries))


def _one_row_of_tiles(
    q_i: Tensor,
    k_all: Tensor,
    v_all: Tensor,
    columns: Iterator[Columns],
    tile: "_Buffer",
) -> tuple[MaxSum, Tensor]:
    """Maximum and sum of the scores of some queries, and the sum of the values that they weigh."""
    state, weighted = MaxSum.nothing(q_i[..., 0]), torch.zeros_like(q_i)
    for keys, hidden in columns:
        s = _scores(q_i, k_all[:, keys], hidden, tile)
        maximum = torch.maximum(state.maximum, s.amax(-1))
        p = s.sub_(reference(maximum)[..., None]).exp_()
        rescaling = state.rescaling(maximum)
        state = MaxSum(maximum, rescaling * state.total + p.sum(-1))
        weighted = weighted.mul_(rescaling[..., None]).baddbmm_(p, v_all[:, keys])
    return state, weighted


class _Buffer:
    """Memory for one tile after the other: a fresh tensor per tile would cost its pages anew each time."""

    def __init__(self, q_groups: Tensor, tiles: FlashTiles, num_keys: int) -> None:
        queries = q_groups.shape[1] * min(tiles.num_queries, q_groups.shape[2])
        wide = accumulate_in(q_groups.dtype)
        self._memory = q_groups.new_empty(q_groups.shape[0] * queries * min(tiles.num_keys, num_keys), dtype=wide)

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x y^T in this memory; the product before it is gone."""
        shape = (x.shape[0], x.shape[1], y.shape[1])
        tile = self._memory[: math.prod(shape)].view(shape)
        return torch.bmm(x, y.transpose(1, 2), out=tile)


def _scores(q_i: Tensor, k_j: Tensor, hidden: Tensor | None, tile: _Buffer) -> Tensor:
    """One tile of S, for all heads of a group at once; what a mask hides is -inf."""
    scores = tile.product(q_i, k_j)
    if hidden is not None:
        scores.view(scores.shape[0], scores.shape[1] // len(hidden), *hidden.shape).masked_fill_(
            hidden.to(scores.device), NOTHING
        )
    return scores
