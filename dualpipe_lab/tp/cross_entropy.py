"""Cross-entropy of logits whose vocabulary is sharded over the ranks: ranks exchange three numbers per token.

Chapter: book/tp/cross-entropy.  In: `logits_..V` of this rank's shard of the vocabulary, all targets.  Out: the loss.
  messages     max: T numbers;  then the sums of exp(z - max) and of the target's z - max: 2 T, in one message or two
               label smoothing adds the sum of z - max: T more
  bytes sent   2 (t - 1) / t * 3 T * 4 per rank (8 in float64); gathering the logits takes (t - 1) / t * T V beta
  backward     dz = (softmax - one-hot) * dloss: no message
  memory       the logits are kept; the backward recomputes the softmax in one buffer of their size
With z' = z - max and log_sum = log of the sum of exp(z'), the loss with both options is
  loss = log_sum - (1 - smoothing) z'_target - smoothing / V * sum of z' + z_loss * (max + log_sum)^2
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


@dataclass(frozen=True)
class LossOptions:
    """Terms that the loss adds to the negative log-likelihood, and targets that it leaves out.

    Attributes:
        ignored: the target of a token that has no loss; torch calls it `ignore_index`.
        label_smoothing: the weight of the uniform distribution over the full vocabulary.
        z_loss: the weight of the squared log of the softmax's denominator.
        packed: sum all numbers in one message after the maximum; False launches one message for each.

    Raises:
        ValueError: `label_smoothing` outside of 0 to 1, `z_loss` below 0.
    """

    ignored: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    packed: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1 or self.z_loss < 0:
            raise ValueError(
                f"a loss needs label_smoothing from 0 to 1 and z_loss from 0, got {self.label_smoothing} and "
                f"{self.z_loss}"
            )


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    vocabulary_size: int,
    tp: TensorParallel | None = None,
    options: LossOptions | None = None,
    reduction: Reduction = "mean",
    num_tokens: int | None = None,
) -> Tensor:
    """Compute the loss of a batch, the same on every rank; each rank gets the gradient of its local logits.

    Args:
        logits: `logits_..V`; V: this rank's shard of the vocabulary, which may be empty.
        targets: `targets_..`, the same on every rank.
        vocabulary_size: of all ranks.
        tp: the ranks (default: the world).
        options: of the loss (default: `LossOptions()`, which ignores the target -100 and adds nothing).
        reduction: "mean" divides by `num_tokens`, "sum" does not, "none" gives the loss of every token.
        num_tokens: of the step (default: the valid targets of this batch); a batch without any has loss 0, not NaN.

    Raises:
        ValueError: a target of a floating type or outside of the vocabulary; logits of another size than this rank's
            shard.
    """
    tp, options = tp or TensorParallel(), options or LossOptions()
    _check_logits(logits, targets, vocabulary_size, tp)
    check_targets(targets, vocabulary_size, options, reduction)
    losses: Tensor = CrossEntropy.apply(flat_tokens(logits), targets.reshape(-1), vocabulary_size, tp, options)
    return reduced(losses, targets, options, reduction, num_tokens)


def reduced(
    losses: Tensor, targets: Tensor, options: LossOptions, reduction: Reduction, num_tokens: int | None
) -> Tensor:
    """Return the losses `losses_T` of all tokens in the shape of `targets_..`, or their sum, or their mean."""
    if reduction == "none":
        return losses.view(targets.shape)
    if reduction == "sum":
        return losses.sum()
    num_tokens = int((targets != options.ignored).sum()) if num_tokens is None else num_tokens
    return losses.sum() / max(num_tokens, 1)


class CrossEntropy(torch.autograd.Function):
    """The loss of every token; logits are `logits_TV`, targets `targets_T`."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocabulary_size: int, tp: TensorParallel, options: LossOptions
    ) -> Tensor:
        wide = at_least_float32(logits)
        largest = wide.amax(1) if wide.shape[1] else wide.new_full((len(wide),), -torch.inf)  # an empty shard
        comm.all_reduce(largest, "max", tp.group)
        shifted = wide - largest[:, None]
        local, column = local_targets(targets, vocabulary_size, tp)
        summands = [_at(shifted, local, column)]
        if options.label_smoothing:
            summands.append(shifted.sum(1))
        summands.append(shifted.exp_().sum(1))
        losses, log_sum = losses_of(largest, summands, targets, vocabulary_size, tp, options)
        ctx.save_for_backward(logits, largest, log_sum, targets)
        ctx.vocabulary_size, ctx.tp, ctx.options = vocabulary_size, tp, options
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, largest, log_sum, targets = ctx.saved_tensors
        shifted = at_least_float32(logits) - largest[:, None]
        dz = logits_grad(shifted, largest, log_sum, targets, grad, ctx.vocabulary_size, ctx.tp, ctx.options)
        return dz.to(logits.dtype), None, None, None, None


def losses_of(
    largest: Tensor,
    summands: list[Tensor],
    targets: Tensor,
    vocabulary_size: int,
    tp: TensorParallel,
    options: LossOptions,
) -> tuple[Tensor, Tensor]:
    """Sum over the ranks; return the loss of every token, and the log of its softmax's denominator.

    `largest_T` is the largest logit on all ranks.  `summands`: this rank's z' of the target; with label smoothing its
    sum of z'; its sum of exp(z').
    """
    if options.packed:
        sums = list(all_reduce_async(torch.stack(summands), tp.group).wait())
    else:
        sums = [pending.wait() for pending in [all_reduce_async(summand, tp.group) for summand in summands]]
    smoothing, log_sum = options.label_smoothing, sums[-1].log()
    log_z, shifted_sum = largest + log_sum, sums[1] if smoothing else 0.0
    likely = (1 - smoothing) * sums[0] + smoothing / vocabulary_size * shifted_sum
    losses = log_sum - likely + options.z_loss * log_z.square()
    return losses.masked_fill_(targets == options.ignored, 0.0), log_sum


def logits_grad(
    shifted: Tensor,
    largest: Tensor,
    log_sum: Tensor,
    targets: Tensor,
    grad: Tensor,
    vocabulary_size: int,
    tp: TensorParallel,
    options: LossOptions,
) -> Tensor:
    """Return the gradient of the logits, given that of the losses, `grad_T`, and z' `shifted_TV`; it overwrites z'."""
    smoothing = options.label_smoothing
    grad = at_least_float32(grad).masked_fill(targets == options.ignored, 0.0)
    dz = shifted.sub_(log_sum[:, None]).exp_()  # the softmax
    dz.mul_((grad * (1 + 2 * options.z_loss * (largest + log_sum)))[:, None])
    local, column = local_targets(targets, vocabulary_size, tp)
    dz[local, column] -= (1 - smoothing) * grad[local]
    if smoothing:
        dz.sub_((smoothing / vocabulary_size * grad)[:, None])
    return dz


def local_targets(targets: Tensor, vocabulary_size: int, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """Return the tokens whose target lies in this rank's shard, and the target's column there.

    On a GPU the host waits for the number of these tokens; Megatron masks instead, and reads a column for every token.
    """
    start, stop = tp.span(vocabulary_size)
    local = ((targets >= start) & (targets < stop)).nonzero().squeeze(1)
    return local, targets[local] - start


def _at(values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    found = values.new_zeros(len(values))
    found[rows] = values[rows, columns]
    return found


def _check_logits(logits: Tensor, targets: Tensor, vocabulary_size: int, tp: TensorParallel) -> None:
    start, stop = tp.span(vocabulary_size)
    if logits.shape != (*targets.shape, stop - start):
        raise ValueError(
            f"tokens {start} to {stop} of a vocabulary of {vocabulary_size} need logits of shape "
            f"{(*targets.shape, stop - start)} for targets of shape {tuple(targets.shape)}, got {tuple(logits.shape)}"
        )


def check_targets(targets: Tensor, vocabulary_size: int, options: LossOptions, reduction: Reduction) -> None:
    """Refuse targets outside of the vocabulary, and an unknown reduction."""
    if targets.is_floating_point():
        raise ValueError(f"targets are whole numbers, got {targets.dtype}; use targets.long()")
    # on a GPU the host waits for the answer, once per loss: a wrong target would read outside of the logits
    wrong = targets[((targets < 0) | (targets >= vocabulary_size)) & (targets != options.ignored)]
    if wrong.numel():
        raise ValueError(
            f"targets run from 0 to {vocabulary_size - 1}, got {int(wrong[0])}; only {options.ignored} is ignored"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"a reduction is mean, sum or none, got {reduction!r}")
