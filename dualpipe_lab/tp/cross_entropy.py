"""Cross-entropy of logits whose vocabulary is sharded over the ranks: ranks exchange three numbers per token.

Chapter: book/tp/cross-entropy.  In: `logits_..V` of this rank's shard of the vocabulary, all targets.  Out: the loss.
  messages     max: T numbers;  then the sums of exp(z - max) and of the target's z - max: 2 T, in one message
               label smoothing adds the sum of z - max: T more
  bytes sent   2 (t - 1) / t * 3 T * 4 per rank (8 in float64); gathering the logits takes (t - 1) / t * T V beta
  backward     dz = (softmax - one-hot) * dloss: no message
  memory       the logits are kept; the backward recomputes the softmax in one buffer of their size
Elsewhere: Megatron `vocab_parallel_cross_entropy`; torch `loss_parallel`.
Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3 (fusing the head with the loss).
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe_lab import comm
from dualpipe_lab.tp.linear import at_least_float32, flat_tokens
from dualpipe_lab.tp.mappings import all_reduce_async
from dualpipe_lab.tp.shard import TensorParallel

Reduction: TypeAlias = Literal["mean", "sum", "none"]


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    vocabulary_size: int,
    tp: TensorParallel | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    num_tokens: int | None = None,
) -> Tensor:
    """Compute the loss of a batch, the same on every rank; each rank gets the gradient of its local logits.

    Args:
        logits: `logits_..V`; V: this rank's shard of the vocabulary, which may be empty.
        targets: `targets_..`, the same on every rank.
        vocabulary_size: of all ranks.
        tp: the ranks (default: the world).
        ignore_index: the target of a token that has no loss.
        label_smoothing: the weight of the uniform distribution over the full vocabulary.
        reduction: "mean" divides by `num_tokens`, "sum" does not, "none" gives the loss of every token.
        num_tokens: of the step (default: the valid targets of this batch); a batch without any has loss 0, not NaN.

    Raises:
        ValueError: a target of a floating type or outside of the vocabulary; logits of another size than this rank's
            shard; `label_smoothing` outside of 0 to 1.
    """
    loss = TokenLoss(tp or TensorParallel(), vocabulary_size, ignore_index, label_smoothing)
    start, stop = loss.tp.span(vocabulary_size)
    if logits.shape != (*targets.shape, stop - start):
        raise ValueError(
            f"tokens {start} to {stop} of a vocabulary of {vocabulary_size} need logits of shape "
            f"{(*targets.shape, stop - start)} for targets of shape {tuple(targets.shape)}, got {tuple(logits.shape)}"
        )
    loss.check(targets, reduction)
    losses: Tensor = CrossEntropy.apply(flat_tokens(logits), targets.reshape(-1), loss)
    return loss.reduced(losses, targets, reduction, num_tokens)


class CrossEntropy(torch.autograd.Function):
    """The loss of every token; logits are `logits_TV`, targets `targets_T`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, loss: "TokenLoss") -> Tensor:
        wide = at_least_float32(logits)
        largest = wide.amax(1) if wide.shape[1] else wide.new_full((len(wide),), -torch.inf)  # an empty shard
        comm.all_reduce(largest, "max", loss.tp.group)
        shifted = wide - largest[:, None]
        local, column = loss.local_targets(targets)
        at_target = shifted.new_zeros(len(shifted))
        at_target[local] = shifted[local, column]
        summands = [at_target]
        if loss.label_smoothing:
            summands.append(shifted.sum(1))
        summands.append(shifted.exp_().sum(1))
        losses, log_sum = loss.of_sums(summands, targets)
        ctx.save_for_backward(logits, largest, log_sum, targets)
        ctx.loss = loss
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, largest, log_sum, targets = ctx.saved_tensors
        shifted = at_least_float32(logits) - largest[:, None]
        return ctx.loss.logits_grad(shifted, log_sum, targets, grad).to(logits.dtype), None, None


@dataclass(frozen=True)
class TokenLoss:
    """The arguments of a loss and its formulas, with z' = z - max and log_sum = log of the sum of exp(z').

    loss = log_sum - (1 - label_smoothing) z'_target - label_smoothing / V * sum of z'
    """

    tp: TensorParallel
    vocabulary_size: int
    ignore_index: int = -100
    label_smoothing: float = 0.0

    def check(self, targets: Tensor, reduction: Reduction) -> None:
        """Refuse targets outside of the vocabulary, a smoothing outside of 0 to 1, and an unknown reduction."""
        if targets.is_floating_point():
            raise ValueError(f"targets are whole numbers, got {targets.dtype}; use targets.long()")
        # on a GPU the host waits for the answer, once per loss: a wrong target would read outside of the logits
        wrong = targets[((targets < 0) | (targets >= self.vocabulary_size)) & (targets != self.ignore_index)]
        if wrong.numel():
            raise ValueError(
                f"targets run from 0 to {self.vocabulary_size - 1}, got {int(wrong[0])}; only {self.ignore_index} is "
                "ignored"
            )
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing is a share from 0 to 1, got {self.label_smoothing}; use 0.1")
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"a reduction is mean, sum or none, got {reduction!r}")

    def local_targets(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens whose target lies in this rank's shard, and the target's column there.

        On a GPU the host waits for the number of these tokens; Megatron masks instead, and reads a column for every
        token.
        """
        start, stop = self.tp.span(self.vocabulary_size)
        local = ((targets >= start) & (targets < stop)).nonzero().squeeze(1)
        return local, targets[local] - start

    def of_sums(self, summands: list[Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
        """Sum over the ranks; return the loss of every token, and the log of its softmax's denominator.

        `summands`: this rank's z' of the target; with label smoothing its sum of z'; its sum of exp(z').
        """
        sums = list(all_reduce_async(torch.stack(summands), self.tp.group).wait())
        smoothing, log_sum = self.label_smoothing, sums[-1].log()
        likely = (1 - smoothing) * sums[0]
        if smoothing:
            likely += smoothing / self.vocabulary_size * sums[1]
        return (log_sum - likely).masked_fill_(targets == self.ignore_index, 0.0), log_sum

    def logits_grad(self, shifted: Tensor, log_sum: Tensor, targets: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of the logits, given that of the losses, `grad_T`; it overwrites z' `shifted_TV`."""
        smoothing = self.label_smoothing
        grad = at_least_float32(grad).masked_fill(targets == self.ignore_index, 0.0)
        dz = shifted.sub_(log_sum[:, None]).exp_()  # the softmax
        dz.mul_(grad[:, None])
        local, column = self.local_targets(targets)
        dz[local, column] -= (1 - smoothing) * grad[local]
        if smoothing:
            dz.sub_((smoothing / self.vocabulary_size * grad)[:, None])
        return dz

    def reduced(self, losses: Tensor, targets: Tensor, reduction: Reduction, num_tokens: int | None) -> Tensor:
        """Return the losses `losses_T` of all tokens in the shape of `targets_..`, or their sum, or their mean."""
        if reduction == "none":
            return losses.view(targets.shape)
        if reduction == "sum":
            return losses.sum()
        num_tokens = int((targets != self.ignore_index).sum()) if num_tokens is None else num_tokens
        return losses.sum() / max(num_tokens, 1)
