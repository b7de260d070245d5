"""`VocabParallelEmbedding`: each rank looks up the tokens of its part of the vocabulary; the sum has them all.

Chapter: book/tp/embedding.  In: token ids, the same on every rank.  Out: `x_..SD`.
  forward      rows of other ranks' tokens are zero; sum over the ranks: T * h * bytes
  backward     dE_r[id] += dy for own tokens, every repetition: no message (sequence parallelism: gather dy first)
  bits         those of one table: sums of one number and zeros
Elsewhere: Megatron `VocabParallelEmbedding`; torch `RowwiseParallel` on `nn.Embedding`.
Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualpipe_lab.tp.config import TensorParallel
from dualpipe_lab.tp.parallel_linear import reduced_output, rows, whole_output_grad
from dualpipe_lab.tp.shard import Shard, initialise, load_state, whole_state


class VocabParallelEmbedding(nn.Module):
    """A table whose rows are spread over the ranks.

    Args:
        vocabulary_size, hidden_size: of the whole table; the last ranks may have fewer rows, or none.
        tp: the ranks (default: the world).
        padding_id: a token whose row gets no gradient.
        dtype: of the table.

    Raises:
        ValueError: `padding_id` is not in the vocabulary.
    """

    def __init__(
        self,
        vocabulary_size: int,
        hidden_size: int,
        tp: TensorParallel | None = None,
        padding_id: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if padding_id is not None and not 0 <= padding_id < vocabulary_size:
            raise ValueError(f"padding_id is a token from 0 to {vocabulary_size - 1}, got {padding_id}")
        self.tp = tp or TensorParallel()
        self.vocabulary_size, self.hidden_size, self.padding_id = vocabulary_size, hidden_size, padding_id
        self.start, stop = self.tp.span(vocabulary_size)
        self.weight = nn.Parameter(torch.empty(stop - self.start, hidden_size, dtype=dtype))
        self.shards = {"weight": Shard(0, self.start, stop, vocabulary_size)}
        initialise(self)

    @classmethod
    def from_full(cls, full: nn.Embedding, tp: TensorParallel | None = None) -> "VocabParallelEmbedding":
        """This rank's part of a table that every rank has whole."""
        table = cls(full.num_embeddings, full.embedding_dim, tp, full.padding_idx, full.weight.dtype)
        load_state(table, full.state_dict())
        return table

    def to_full(self) -> nn.Embedding:
        """The whole table, on every rank; all ranks call this together."""
        (weight,) = whole_state(self, self.tp.group).values()
        return nn.Embedding.from_pretrained(weight, freeze=False, padding_idx=self.padding_id)

    def forward(self, ids: Tensor) -> Tensor:
        """`x_..SD` of `ids_..S`; under sequence parallelism the rank's tokens of it.

        Raises:
            ValueError: an id outside of the vocabulary, or ids that are no whole numbers.
        """
        if ids.is_floating_point():
            raise ValueError(f"token ids are whole numbers, got {ids.dtype}; use ids.long()")
        wrong = ids[(ids < 0) | (ids >= self.vocabulary_size)]
        if wrong.numel():
            raise ValueError(f"token ids run from 0 to {self.vocabulary_size - 1}, got {int(wrong[0])}")
        out: Tensor = Lookup.apply(ids, self.weight, self.start, self.padding_id, self.tp)
        return out


class Lookup(torch.autograd.Function):
    """Own rows where the token is one's own, zeros elsewhere; then the sum over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, start: int, padding_id: int | None, tp: TensorParallel
    ) -> Tensor:
        place = ids.reshape(-1) - start
        mine = ((place >= 0) & (place < len(weight))).nonzero().squeeze(1)
        place = place[mine]
        found = weight.new_zeros(ids.numel(), weight.shape[1])
        found[mine] = weight[place]
        ctx.save_for_backward(mine, place)
        ctx.num_rows, ctx.tp = len(weight), tp
        ctx.padding = None if padding_id is None else padding_id - start
        return reduced_output(found.view(*ids.shape, weight.shape[1]), None, tp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mine, place = ctx.saved_tensors
        grad = rows(whole_output_grad(grad, ctx.tp))
        table = grad.new_zeros(ctx.num_rows, grad.shape[1]).index_add_(0, place, grad[mine])
        if ctx.padding is not None and 0 <= ctx.padding < ctx.num_rows:
            table[ctx.padding] = 0
        return None, table, None, None, None
