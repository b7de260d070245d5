"""`LMHead`: each rank computes the logits of its shard of the vocabulary; the loss never gathers them.

Chapter: book/tp/lm-head.  In: `x_..SD`, the same on every rank (under sequence parallelism the rank's tokens).
Out: `logits_..SV` of this rank's shard; the loss.
  bytes     backward: sum of dx, T * h * bytes; the loss: 3 numbers per token
  instead   gathering the logits sends (t - 1) / t * T V beta per rank: V beta / 24 times the bytes of the loss
  memory    T * V / t logits; with `chunk` those of one chunk of tokens at a time
Elsewhere: Megatron `parallel_output=True`; torch `ColwiseParallel(use_local_output=False)` with `loss_parallel`.
Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn

from dualpipe_lab.dp.flat_parameter import is_absent
from dualpipe_lab.tp.chunked_cross_entropy import chunked_cross_entropy
from dualpipe_lab.tp.cross_entropy import cross_entropy
from dualpipe_lab.tp.embedding import VocabParallelEmbedding
from dualpipe_lab.tp.linear import ColumnParallelLinear
from dualpipe_lab.tp.shard import TensorParallel, load_full_state_dict


class LMHead(ColumnParallelLinear):
    """The output layer: column-parallel over the vocabulary, without a bias.

    Args:
        hidden_size, vocabulary_size: of the full layer; the last ranks may have fewer entries, or none.
        tp: the ranks (default: the world).
        tied: share this embedding's table; the rank that holds a row then adds the gradients of both uses.
        dtype: of the weight.
    """

    def __init__(
        self,
        hidden_size: int,
        vocabulary_size: int,
        *,
        tp: TensorParallel | None = None,
        tied: VocabParallelEmbedding | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, vocabulary_size, bias=False, tp=tp, dtype=dtype)
        if tied is not None:
            self.weight: nn.Parameter = tied.weight

    @classmethod
    def from_full(cls, full: nn.Linear, tp: TensorParallel | None = None, **options: Any) -> Self:
        """Shard a head that every rank has in full, on any device; ValueError if it has a bias."""
        head = cls(full.in_features, full.out_features, tp=tp, dtype=full.weight.dtype, **options)
        load_full_state_dict(head, full.state_dict())
        return head

    def forward(self, x: Tensor, targets: Tensor | None = None, chunk: int = 0, **options: Any) -> Tensor:
        """Return `logits_..SV` of `x_..SD`; with targets their loss in chunks, as `chunked_cross_entropy` has it.

        Raises:
            ValueError: ZeRO-3 has freed the weight, which would be read as NaN.
        """
        if targets is None:
            return super().forward(x)
        if is_absent(self.weight):
            raise ValueError(
                "a loss in chunks uses the head behind its stage, and ZeRO-3 has freed the unit that holds the head's "
                "weight; make the head a unit of its own, use ZeRO-2, or leave loss_chunk out"
            )
        return chunked_cross_entropy(x, self.weight, targets, self.out_features, chunk, self.tp, **options)

    def loss(self, x: Tensor, targets: Tensor, chunk: int | None = None, **options: Any) -> Tensor:
        """Compute the loss of the tokens `x_..SD`; `options` are those of `cross_entropy`.

        With `chunk`, the logits of that number of tokens exist at a time; see `chunked_cross_entropy`.
        """
        if chunk is None:
            return self.loss_of(self(x), targets, **options)
        loss: Tensor = self(x, targets, chunk, **options)  # a call, for hooks that gather the weight
        return loss

    def loss_of(self, logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """Compute the loss of `logits_..SV`, V: this rank's shard of the vocabulary; `options` as in `loss`."""
        return cross_entropy(logits, targets, self.out_features, self.tp, **options)
