"""Online softmax: two numbers summarise a block of scores, and the pairs of two blocks merge into one pair.

Chapter: book/cp/online-softmax.  In: scores in blocks of any sizes, in any order.  Out: their maximum and sum.
  pair     m = max x,  l = sum exp(x - m)                               of a block; of no scores: (-inf, 0)
  merge    M = max(m, m'),  L = exp(m - M) l + exp(m' - M) l'            associative and commutative
  values   A = sum exp(x - m) v is rescaled with l, by the same factor   so that A / l is the softmax-weighted average
  reads    2 passes over x for weights (safe softmax: 3), 1 pass for an average;   state: 2 numbers per row
Elsewhere: `torch.logsumexp`, `torch.logaddexp` (the pair as one number, m + ln l).
Source: Milakov and Gimelshein 2018 (arXiv 1805.02867), sections 3 and 3.1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dualpipe_lab.cp.softmax import NEG_INF, accumulation_dtype, reference


class SoftmaxStats(NamedTuple):
    """The maximum m of some scores and the sum l of exp(score - m), per row.

    >>> a, b = SoftmaxStats.of(torch.tensor([1.0, 3.0])), SoftmaxStats.of(torch.tensor([2.0]))
    >>> bool(a.merge(b).lse.isclose(torch.tensor([1.0, 2.0, 3.0]).logsumexp(-1)))
    True
    """

    maximum: Tensor
    total: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "SoftmaxStats":
        """Return the pair of the scores along the last axis, which may have length 0."""
        wide = x.to(accumulation_dtype(x.dtype))
        if x.shape[-1] == 0:
            return cls.identity(wide.sum(-1))
        maximum = wide.amax(-1)
        return cls(maximum, torch.exp(wide - reference(maximum)[..., None]).sum(-1))

    @classmethod
    def identity(cls, like: Tensor) -> "SoftmaxStats":
        """Return the pair of no scores, the identity of `merge`: one per element of `like`."""
        return cls(torch.full_like(like, NEG_INF), torch.zeros_like(like))

    def merge(self, other: "SoftmaxStats") -> "SoftmaxStats":
        """Return the pair of the union of both sets of scores."""
        maximum = torch.maximum(self.maximum, other.maximum)
        return SoftmaxStats(maximum, self.rescaling(maximum) * self.total + other.rescaling(maximum) * other.total)

    def rescaling(self, maximum: Tensor) -> Tensor:
        """Return the factor exp(m - M), which turns sums over exp(x - m) into sums over exp(x - M); M is at least m."""
        return torch.exp(self.maximum - reference(maximum))

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of the scores: m + ln l, and -inf for no scores."""
        return self.maximum + torch.log(self.total)

    def weights(self, x: Tensor) -> Tensor:
        """Return the softmax weights of some of the scores; where the sum l is 0 they are 0."""
        total = self.total.masked_fill(self.total == 0, 1)
        return (torch.exp(x - reference(self.maximum)[..., None]) / total[..., None]).to(x.dtype)


def online_softmax(x: Tensor, block_size: int) -> Tensor:
    """Return the softmax over the last axis, block by block: one pass for the pair, one for the weights.

    Raises:
        ValueError: a block size below 1.
    """
    state = SoftmaxStats.identity(x[..., :0].sum(-1, dtype=accumulation_dtype(x.dtype)))
    for block in _blocks(x, block_size):
        state = state.merge(SoftmaxStats.of(block))
    return torch.cat([state.weights(block) for block in _blocks(x, block_size)], -1)


def online_average(x: Tensor, v: Tensor, block_size: int) -> Tensor:
    """Return softmax(x) v, the average of the values weighted by the softmax of the scores, in one pass.

    Args:
        x: scores `x_..K`; K: keys.
        v: values `v_..KD`; D: size of a value.
        block_size: keys at a time.

    Raises:
        ValueError: a block size below 1.
    """
    state = SoftmaxStats.identity(x[..., :0].sum(-1, dtype=accumulation_dtype(x.dtype)))
    weighted = torch.zeros_like(v[..., 0, :], dtype=accumulation_dtype(v.dtype))
    for scores, values in zip(_blocks(x, block_size), v.split(block_size, -2), strict=True):
        merged = state.merge(SoftmaxStats.of(scores))
        powers = torch.exp(scores - reference(merged.maximum)[..., None])
        # sum and weighted sum are rescaled together, or the average would mix two scales
        weighted = state.rescaling(merged.maximum)[..., None] * weighted + (powers[..., None, :] @ values)[..., 0, :]
        state = merged
    return (weighted / state.total.masked_fill(state.total == 0, 1)[..., None]).to(v.dtype)


def _blocks(x: Tensor, block_size: int) -> tuple[Tensor, ...]:
    if block_size < 1:
        raise ValueError(f"a block holds at least 1 score, got block_size={block_size}")
    blocks: tuple[Tensor, ...] = x.split(block_size, -1)
    return blocks
