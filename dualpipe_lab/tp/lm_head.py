"""`LMHead`: each rank computes the logits of its shard of the vocabulary; the loss never gathers them.

Chapter: book/tp/lm-head.  In: `x_..SD`, the same on every rank (under sequence parallelism the rank's tokens).
Out: `logits_..SV` of this rank's shard; the loss.
  bytes     backward: sum of dx, T * h * bytes; the loss: 3 numbers per token
  instead   gathering the logits sends (t - 1) / t * T V beta per rank: V beta / 24 times the bytes of the loss
  memory    T * V / t logits
Elsewhere: Megatron `parallel_output=True`; torch `ColwiseParallel(use_local_output=False)` with `loss_parallel`.
Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dualpipe_lab.tp.config import TensorParallel
from dualpipe_lab.tp.cross_entropy import cross_entropy
from dualpipe_lab.tp.embedding import VocabParallelEmbedding
from dualpipe_lab.tp.linear import ColumnParallelLinear


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
        tp: TensorParallel | None = None,
        tied: VocabParallelEmbedding | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, vocabulary_size, bias=False, tp=tp, dtype=dtype)
        if tied is not None:
            self.weight: nn.Parameter = tied.weight

    def loss(self, x: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """Compute the loss of the tokens `x_..SD`; `options` are those of `cross_entropy`."""
        return self.loss_of(self(x), targets, **options)

    def loss_of(self, logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """Compute the loss of `logits_..SV`, V: this rank's shard of the vocabulary; `options` as in `loss`."""
        return cross_entropy(logits, targets, self.out_features, self.tp, **options)
