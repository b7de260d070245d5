"""`VocabParallelEmbedding`: each rank looks up tokens in its shard of the vocabulary; the ranks sum their results.

Chapter: book/tp/embedding.  In: token ids, the same on every rank.  Out: `x_..SD`.
  forward      rows of other ranks' tokens are zero; sum over the ranks: T * h * bytes
  backward     dE_r[id] += dy for every occurrence of a local token: no message (sequence parallelism: gather dy first)
  bits         equal to one full table: each sum adds one number to zeros
Elsewhere: Megatron `VocabParallelEmbedding`; torch `RowwiseParallel` on `nn.Embedding`.
Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualpipe_lab.launch.context import device
from dualpipe_lab.tp.linear import flat_tokens
from dualpipe_lab.tp.mappings import gather_output_grad, reduce_output
from dualpipe_lab.tp.shard import Shard, TensorParallel, initialize_parameters, load_full_state_dict, ranks_of


class VocabParallelEmbedding(nn.Module):
    """An embedding table whose rows are sharded over the ranks.

    Args:
        vocabulary_size, hidden_size: of the full table; the last ranks may have fewer rows, or none.
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
        *,
        tp: TensorParallel | None = None,
        padding_id: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if padding_id is not None and not 0 <= padding_id < vocabulary_size:
            raise ValueError(f"padding_id is a token from 0 to {vocabulary_size - 1}, got {padding_id}")
        self.tp = ranks_of(tp)
        self.vocabulary_size, self.hidden_size, self.padding_id = vocabulary_size, hidden_size, padding_id
        self.start, stop = self.tp.span(vocabulary_size)
        self.weight = nn.Parameter(torch.empty(stop - self.start, hidden_size, dtype=dtype, device=device()))
        self.shards = {"weight": Shard(0, self.start, stop, vocabulary_size)}
        initialize_parameters(self)

    @classmethod
    def from_full(cls, full: nn.Embedding, tp: TensorParallel | None = None) -> "VocabParallelEmbedding":
        """Shard a table that every rank has in full."""
        options = {"tp": tp, "padding_id": full.padding_idx, "dtype": full.weight.dtype}
        table = cls(full.num_embeddings, full.embedding_dim, **options)
        load_full_state_dict(table, full.state_dict())
        return table

    def forward(self, ids: Tensor) -> Tensor:
        """Return `x_..SD` of `ids_..S`; under sequence parallelism, the rank's tokens of it.

        Raises:
            ValueError: an id outside of the vocabulary, or ids of a floating type.
        """
        if ids.is_floating_point():
            raise ValueError(f"token ids are whole numbers, got {ids.dtype}; use ids.long()")
        wrong = ids[(ids < 0) | (ids >= self.vocabulary_size)]
        if wrong.numel():
            raise ValueError(f"token ids run from 0 to {self.vocabulary_size - 1}, got {int(wrong[0])}")
        out: Tensor = Lookup.apply(ids, self.weight, self.start, self.padding_id, self.tp)
        return out


class Lookup(torch.autograd.Function):
    """Look up local tokens, leave zeros for all others, and sum over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, start: int, padding_id: int | None, tp: TensorParallel
    ) -> Tensor:
        row = ids.reshape(-1) - start
        # tokens whose rows this rank holds; on a GPU the host waits for their number, as for the check of the ids
        local = ((row >= 0) & (row < len(weight))).nonzero().squeeze(1)
        row = row[local]
        found = weight.new_zeros(ids.numel(), weight.shape[1])
        found[local] = weight[row]
        ctx.save_for_backward(local, row)
        ctx.num_rows, ctx.tp = len(weight), tp
        ctx.padding = None if padding_id is None else padding_id - start
        return reduce_output(found.view(*ids.shape, weight.shape[1]), tp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        local, row = ctx.saved_tensors
        grad = flat_tokens(gather_output_grad(grad, ctx.tp))
        table = grad.new_zeros(ctx.num_rows, grad.shape[1]).index_add_(0, row, grad[local])
        if ctx.padding is not None and 0 <= ctx.padding < ctx.num_rows:
            table[ctx.padding] = 0
        return None, table, None, None, None
