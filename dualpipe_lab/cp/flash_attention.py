"""FlashAttention-2 in plain torch: attention tile by tile, without a matrix of scores, forward and backward.

Chapter: book/cp/flash-attention.  In: queries, keys, values.  Out: softmax(scale Q K^T) V, and the gradients.
              saved for the backward      read and written per pass          products of s x s x d
  naive       Q, K, V and s x s weights   s^2                                2 forward, 4 backward
  tiled       Q, K, V, O and s numbers    s^2 d / tile, a tile at a time      2 forward, 5 backward (S once more)
with s positions and head size d; per batch and head.  Activations grow with s instead of its square.
Elsewhere: `torch.nn.functional.scaled_dot_product_attention`; the flash-attn package.  `is_causal` of torch aligns the
first query with the first key (`top_left`), flash-attn from 2.1 the last with the last (`bottom_right`).
Source: Dao 2023 (arXiv 2307.08691), algorithms 1 and 2; Ainslie et al. 2023 (arXiv 2305.13245) for grouped heads.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe_lab.cp.online_softmax import SoftmaxStats
from dualpipe_lab.cp.softmax import NEG_INF, accumulation_dtype, reference

Causal: TypeAlias = Literal["top_left", "bottom_right"]
Grads = tuple[Tensor, Tensor, Tensor]


class Kernel(Protocol):
    """Attention of one block of queries to one block of keys, as ring attention calls it.

    `offset`: None if every query sees every key, else query i sees the keys up to i + offset.  Ring attention passes
    None or 0.  `out` and `lse` of the backward are the final values over all keys, not those of this block: given them,
    P and dS of any subset of the keys are exact.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, offset: int | None, scale: float, /) -> tuple[Tensor, Tensor]:
        """Return `out_BHSD` and `lse_BHS`."""

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        offset: int | None,
        scale: float,
        /,
    ) -> Grads:
        """Return the gradients of q, k, v."""


class KeyTile(NamedTuple):
    """The keys of one tile, and which of them are hidden from each query of the tile (None: no key is)."""

    keys: slice
    hidden: Tensor | None


@dataclass(frozen=True)
class FlashTiles:
    """The kernel in plain torch: it computes `num_queries` x `num_keys` scores at a time, of all heads at once.

    For 16-bit inputs sums are kept in fp32, and results are returned in fp32.

    Raises:
        ValueError: a tile without a query or a key.
    """

    num_queries: int = 256
    num_keys: int = 256

    def __post_init__(self) -> None:
        if min(self.num_queries, self.num_keys) < 1:
            raise ValueError(f"a tile holds at least 1 query and 1 key, got {self.num_queries} x {self.num_keys}")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, offset: int | None, scale: float) -> tuple[Tensor, Tensor]:
        """Return `out_BHSD` and `lse_BHS`; arguments as in `Kernel`.

        m, l and A = sum exp(s - m) v are rescaled tile by tile; O = A / l and LSE = m + ln l once, at the end.
        """
        wide = accumulation_dtype(q.dtype)
        q_groups, k_all, v_all = _grouped(q, k.shape[1]), k.flatten(0, 1).to(wide), v.flatten(0, 1).to(wide)
        out, lse = (torch.empty(q_groups.shape[:axes], dtype=wide, device=q.device) for axes in (4, 3))
        tile = _Buffer(q_groups, self, k.shape[2])
        for rows in _tiles(q.shape[2], self.num_queries):
            q_i = _rows_of(q_groups, rows).to(wide) * scale
            state, weighted = SoftmaxStats.identity(q_i[..., 0]), torch.zeros_like(q_i)
            for keys, hidden in self.key_tiles(rows, k.shape[2], offset, q.device):
                s = _scores(q_i, k_all[:, keys], hidden, tile)
                maximum = torch.maximum(state.maximum, s.amax(-1))
                p = s.sub_(reference(maximum)[..., None]).exp_()
                rescaling = state.rescaling(maximum)
                state = SoftmaxStats(maximum, rescaling * state.total + p.sum(-1))
                weighted = weighted.mul_(rescaling[..., None]).baddbmm_(p, v_all[:, keys])
            weighted.div_(state.total.masked_fill(state.total == 0, 1)[..., None])
            out[:, :, rows], lse[:, :, rows] = (
                found.unflatten(1, (q_groups.shape[1], rows.stop - rows.start)) for found in (weighted, state.lse)
            )
        return out.view(q.shape), lse.view(q.shape[:3])

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, offset: int | None, scale: float
    ) -> Grads:
        """Return the gradients of q, k, v; arguments as in `Kernel`.

        P = exp(S - LSE),  dP = dO V^T,  D = rowsum(dO * O) = rowsum(P * dP),  dS = P * (dP - D);  with the scale c:
        dQ = c dS K,  dK = c dS^T Q,  dV = P^T dO.
        """
        wide, kv_heads = accumulation_dtype(q.dtype), k.shape[1]
        k_all, v_all = k.flatten(0, 1).to(wide), v.flatten(0, 1).to(wide)
        dk, dv = torch.zeros_like(k_all), torch.zeros_like(v_all)
        q_groups, grad_groups = _grouped(q, kv_heads), _grouped(grad, kv_heads)
        delta = _grouped((grad.to(wide) * out).sum(-1), kv_heads)  # D
        # a query that sees nothing: exp(s - inf) = 0 for every key
        lse_groups = _grouped(lse.masked_fill(lse == NEG_INF, float("inf")), kv_heads)
        dq = torch.empty(q_groups.shape, dtype=wide, device=q.device)
        tile, tile_grad = (_Buffer(q_groups, self, k.shape[2]) for _ in range(2))
        for rows in _tiles(q.shape[2], self.num_queries):
            q_i, do_i = _rows_of(q_groups, rows).to(wide) * scale, _rows_of(grad_groups, rows).to(wide)
            lse_i, delta_i = (_rows_of(x, rows)[..., None] for x in (lse_groups, delta))
            dq_i = torch.zeros_like(q_i)
            for keys, hidden in self.key_tiles(rows, k.shape[2], offset, q.device):
                k_j, v_j = k_all[:, keys], v_all[:, keys]
                p = _scores(q_i, k_j, hidden, tile).sub_(lse_i).exp_()
                dv[:, keys].baddbmm_(p.transpose(1, 2), do_i)
                ds = tile_grad.product(do_i, v_j).sub_(delta_i).mul_(p)
                dq_i.baddbmm_(ds, k_j)
                dk[:, keys].baddbmm_(ds.transpose(1, 2), q_i)  # q_i carries the scale
            dq[:, :, rows] = dq_i.mul_(scale).unflatten(1, (q_groups.shape[1], rows.stop - rows.start))
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)

    def key_tiles(
        self, rows: slice, num_keys: int, offset: int | None, device: torch.device | None = None
    ) -> Iterator[KeyTile]:
        """Yield the tiles of keys that some of the queries `rows` see; a tile that no query sees is skipped."""
        for keys in _tiles(num_keys, self.num_keys):
            if offset is None or keys.stop - 1 <= rows.start + offset:
                yield KeyTile(keys, None)
            elif keys.start <= rows.stop - 1 + offset:
                ones = torch.ones(rows.stop - rows.start, keys.stop - keys.start, dtype=torch.bool, device=device)
                yield KeyTile(keys, ones.triu(rows.start + offset - keys.start + 1))


def _tiles(length: int, size: int) -> Iterator[slice]:
    for first in range(0, length, size):
        yield slice(first, min(first + size, length))


class _Buffer:
    """Memory that all tiles share in turn: a fresh tensor per tile would fault its pages in anew each time."""

    def __init__(self, q_groups: Tensor, tiles: FlashTiles, num_keys: int) -> None:
        queries = q_groups.shape[1] * min(tiles.num_queries, q_groups.shape[2])
        wide = accumulation_dtype(q_groups.dtype)
        self._memory = q_groups.new_empty(q_groups.shape[0] * queries * min(tiles.num_keys, num_keys), dtype=wide)

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x y^T in this memory, which overwrites the previous product."""
        shape = (x.shape[0], x.shape[1], y.shape[1])
        tile = self._memory[: math.prod(shape)].view(shape)
        return torch.bmm(x, y.transpose(1, 2), out=tile)


def _scores(q_i: Tensor, k_j: Tensor, hidden: Tensor | None, tile: _Buffer) -> Tensor:
    """Return one tile of S for all heads of a group; hidden scores are -inf."""
    scores = tile.product(q_i, k_j)
    if hidden is not None:
        scores.view(scores.shape[0], scores.shape[1] // len(hidden), *hidden.shape).masked_fill_(hidden, NEG_INF)
    return scores


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: Causal | None = None,
    scale: float | None = None,
    tiles: FlashTiles | None = None,
) -> Tensor:
    """Attend from queries to keys tile by tile; differentiable.  Returns `out_BHSD`.

    Args:
        q: `q_BHSD`; B: batch, H: query heads, S: positions, D: size of a head.
        k: `k_BKTD`; K: key and value heads, of which each serves H / K consecutive query heads; T: positions of keys.
        v: `v_BKTD`.
        causal: the corner of the scores at which query and key have the same position, if S and T differ; None: every
            query sees every key.  A query that sees no key gets an output of zeros and a gradient of zeros.
        scale: of the scores (default: D ** -0.5, with which scores of random vectors have variance 1).
        tiles: the size of a tile; it changes nothing but rounding.

    Raises:
        ValueError: shapes that do not fit together, or an unknown `causal`.
    """
    check_heads(q, k, v)
    if causal not in (None, "top_left", "bottom_right"):
        raise ValueError(f"causal is None, top_left or bottom_right, got {causal!r}")
    offset = None if causal is None else k.shape[2] - q.shape[2] if causal == "bottom_right" else 0
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = _FlashAttention.apply(q, k, v, offset, scale, tiles or FlashTiles())
    return out


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, q: Tensor, k: Tensor, v: Tensor, offset: int | None, scale: float, tiles: FlashTiles
    ) -> Tensor:
        out, lse = tiles.forward(q, k, v, offset, scale)
        out = out.to(q.dtype)
        context.save_for_backward(q, k, v, out, lse)
        context.offset, context.scale, context.tiles = offset, scale, tiles
        return out

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = context.saved_tensors
        grads = context.tiles.backward(grad, q, k, v, out, lse, context.offset, context.scale)
        return (*(found.to(x.dtype) for found, x in zip(grads, (q, k, v), strict=True)), None, None, None)


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse queries, keys and values whose shapes do not fit together."""
    shapes = [tuple(tensor.shape) for tensor in (q, k, v)]
    if any(len(shape) != 4 for shape in shapes) or k.shape != v.shape:
        raise ValueError(f"attention takes q (batch, heads, positions, size) and k, v of one shape, got {shapes}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k need the same batch and head size, got {shapes[0]} and {shapes[1]}")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must divide among KV heads, and {q.shape[1]} do not divide among {k.shape[1]}")


def _grouped(x: Tensor, num_kv_heads: int) -> Tensor:
    """Return `x_NGSD`, N = B K, G = H / K, of a tensor with the axes of q, or with all of them but the last."""
    batch, heads, *rest = x.shape
    view: Tensor = x.reshape(batch * num_kv_heads, heads // num_kv_heads, *rest)
    return view


def _rows_of(x: Tensor, rows: slice) -> Tensor:
    """Return the rows of some queries, of all heads of a group under one another: `x_NRD`, R = G rows.

    A product then needs no copies of the keys, and sums the gradient of a KV head over its query heads.
    """
    rows_x = x[:, :, rows]
    # counted, not -1: without a batch or heads there are no elements from which it could be inferred
    stacked: Tensor = rows_x.reshape(rows_x.shape[0], rows_x.shape[1] * rows_x.shape[2], *rows_x.shape[3:])
    return stacked
