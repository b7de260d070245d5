"""`MTPStage`: the last stage of a V3-style model, which predicts a second token as well, only in training.

Chapter: book/whole/two-tokens.  In: x_BSD or ids_BS, and the ids and targets one position further.
Out: logits_BSV of the next token, and the weighted loss of the one after it.
  h'_i = M [norm(h_i); norm(E(t_i+1))]      h_i: output of the last layer; t_i: the token at i; M: 2h x h numbers
  p_i  = head(norm(layer(h')_i))            predicts t_i+2; E and the head are those of the model
Along pp, the last stage has a copy of E if the first stage is another one: `runtime.sum_tied(rank_model.tied)` adds the
gradients of both uses.
Elsewhere: Megatron `MultiTokenPredictionLayer`; DeepSeek-V3's published layer 61, where M takes the embedding first.
Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 2.2; Gloeckle et al. 2024 (arXiv 2404.19737).
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dualpipe_lab.dp.data_parallel import IGNORE_INDEX
from dualpipe_lab.models.parameters import TABLE
from dualpipe_lab.models.stage import Sharing, make_norm
from dualpipe_lab.models.v3_moe import V3Layer, V3Stage
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.pp.runtime.stage import WithLoss
from dualpipe_lab.tp.embedding import VocabParallelEmbedding
from dualpipe_lab.tp.linear import ColumnParallelLinear
from dualpipe_lab.tp.mappings import TOKENS, slice_to_ranks

MTP_PREFIX = "mtp."  # how the names of the extra parameters begin
COPY = f"{MTP_PREFIX}embedding.weight"  # the last stage's name for the embedding's table


class NextTokens(NamedTuple):
    """The next token of each position, `ids_BS` (at the end 0), and the target after the next, `targets_BS` (-100)."""

    next_ids: Tensor
    next_targets: Tensor


def next_tokens(ids: Tensor, targets: Tensor) -> NextTokens:
    """Shift full sequences by one position; shard the result along cp as the ids are sharded.

    A rank's shard of a sequence cannot be shifted: the token after its last one is on another rank.  The last position
    has no target, and its input is token 0, which no other position sees; as any token, it counts in the balance loss.

    Args:
        ids: `ids_..S`, full sequences.
        targets: `targets_..S`, the token after each, or -100 for no target.

    Raises:
        ValueError: other shapes, or sequences of one token.

    >>> [shifted.tolist() for shifted in next_tokens(torch.tensor([[5, 6, 7]]), torch.tensor([[6, 7, 8]]))]
    [[[6, 7, 0]], [[7, 8, -100]]]
    """
    if ids.shape != targets.shape or ids.dim() < 1 or ids.shape[-1] < 2:
        raise ValueError(
            "a second token needs ids and targets of one shape, with 2 tokens or more, got "
            f"{tuple(ids.shape)} and {tuple(targets.shape)}"
        )
    return NextTokens(pad(ids[..., 1:], (0, 1)), pad(targets[..., 1:], (0, 1), value=IGNORE_INDEX))


class MTPModule(nn.Module):
    """What the prediction of a second token adds to a model: two norms, a projection, a layer and a last norm.

    Where the embedding is on another stage, a copy of its table is here (`has_table`).
    """

    def __init__(self, config: V3MoEConfig, sharing: Sharing, layer: V3Layer, has_table: bool) -> None:
        super().__init__()
        hidden, tp, dtype = config.hidden_size, sharing.tp, sharing.dtype
        table = VocabParallelEmbedding(config.vocabulary_size, hidden, tp=tp, dtype=dtype) if has_table else None
        self.tp, self.embedding = tp, table
        self.hidden_norm, self.embedding_norm = (make_norm(config.dense, tp, dtype) for _ in range(2))
        self.projection = ColumnParallelLinear(2 * hidden, hidden, bias=False, tp=tp, gather_output=True, dtype=dtype)
        self.layer = layer
        self.norm = make_norm(config.dense, tp, dtype)

    def forward(
        self,
        hidden: Tensor,
        after: Tensor,
        positions: Tensor | None = None,
        num_sequences: int | None = None,
        padding: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the head's input `x_BSD` for the second token, and the extra layer's balance loss or None.

        `hidden`: `h_BSD`, the output of the model's last layer.  `after`: with a table here, the next tokens' `ids_BS`;
        else their embeddings `e_BSD`.
        """
        x, balance = self.layer(self.combine(hidden, after), positions, num_sequences, padding)
        return self.norm(x), balance

    def combine(self, hidden: Tensor, after: Tensor) -> Tensor:
        """Return `h'_BSD`, the input of the extra layer; the arguments are those of `forward`."""
        embedded = after if self.embedding is None else self.embedding(after)
        both = torch.cat((self.hidden_norm(hidden), self.embedding_norm(embedded)), -1)
        x: Tensor = self.projection(both)
        return slice_to_ranks(x, TOKENS, self.tp.group) if self.tp.sequence_parallel else x


class MTPStage(V3Stage):
    """The last stage of a V3-style model that is trained to predict a second token; made by `build_stages`.

    `weight`: lambda, of the second token's loss; `mtp`: what the second token adds to the model.
    """

    def __init__(self, config: V3MoEConfig, sharing: Sharing, layers: range, is_first: bool, weight: float) -> None:
        super().__init__(config, sharing, layers, is_first, is_last=True)
        extra = V3Layer(config, sharing, self.ep, None, config.num_layers)
        self.weight = weight
        self.mtp = MTPModule(config, sharing, extra, not is_first)
        self.tied_names = {} if is_first else {COPY: TABLE}

    def leave(self, x: Tensor) -> Tensor:
        """Return the output of the last layer, which both tokens use."""
        return x

    def answer(self, hidden: Tensor) -> Tensor:
        """Return what `loss_of` takes for the next token, of `h_BSD`: the output of a stage without a second one."""
        return super().leave(hidden)

    def forward(
        self,
        x: Tensor,
        next_ids: Tensor | None = None,
        next_targets: Tensor | None = None,
        *,
        padding: Tensor | None = None,
    ) -> WithLoss:
        """Return the output of `V3Stage`, and this stage's losses: the balance, and the second token's.

        `next_ids`, `next_targets`: both `_BS`, of `next_tokens`; ValueError if one is missing in training.
        """
        hidden, balance = self.run_layers(x, self.num_sequences, padding)
        output, loss = self.answer(hidden), self.config.balance * balance
        if next_ids is None or next_targets is None:
            self.check_evaluation()
            return WithLoss(output, loss)
        return WithLoss(output, loss + self.mtp_loss(hidden, next_ids, next_targets, padding))

    def check_evaluation(self) -> None:
        """Refuse a forward without the next tokens in training."""
        if self.training:
            rule = "a model that predicts a second token is trained with next_ids and next_targets"
            raise ValueError(f"{rule}, got none; pass extra=rank_model.extra_inputs(*next_tokens(ids, targets))")

    def mtp_loss(self, hidden: Tensor, next_ids: Tensor, next_targets: Tensor, padding: Tensor | None = None) -> Tensor:
        """Compute the weighted loss of the second token from `h_BSD`, plus the extra layer's balance loss."""
        after = next_ids if self.embedding is None else self.embedding(next_ids)
        x, balance = self.run(self.mtp, hidden, after, self.positions(hidden.device), self.num_sequences, padding)
        loss = self.weighted_loss(x, next_targets)
        return loss if balance is None else loss + self.config.balance * balance

    def weighted_loss(self, x: Tensor, next_targets: Tensor) -> Tensor:
        """Compute the weighted loss of the second token from the head's input `x_BSD`.

        It is the sum of -log p_i[t_i+2], divided by the number of valid targets of the next token, on all ranks.
        """
        if self.num_tokens is None:
            raise ValueError("the second token's loss is divided by the tokens of the step; call begin_step first")
        return self.weight * self.loss_of(self.scored(x), next_targets, num_tokens=self.num_tokens)
