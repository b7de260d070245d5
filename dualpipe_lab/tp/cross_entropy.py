"""Cross-entropy of logits whose vocabulary is spread over the ranks: three numbers per token travel, no logits.

Chapter: book/tp/cross-entropy.  In: `logits_..V` of this rank's part of the vocabulary, whole targets.  Out: the loss.
  messages     max: T numbers;  then sum of exp(z - max) and the target's z - max: 2 T, packed in one or in two
               label smoothing adds the sum of z - max: T more
  bytes sent   2 (t - 1) / t * 3 T * 4 per rank (8 in float64); gathering the logits takes (t - 1) / t * T V beta
  backward     dz = (softmax - one-hot) * dloss: no message
  memory       the logits are kept, the softmax is computed again in the backward, in one buffer of their size
With z' = z - max, log_sum that of the summed exponentials, and both options of the loss at work:
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
from dualpipe_lab.dp.data_parallel import IGNORED
from dualpipe_lab.tp.async_collectives import start_sum
from dualpipe_lab.tp.config import TensorParallel
from dualpipe_lab.tp.parallel_linear import rows

Reduction: TypeAlias = Literal["mean", "sum", "none"]


@dataclass(frozen=True)
class LossOptions:
    """What the loss adds to the negative log-likelihood.

    Attributes:
        ignored: the target of a token that has no loss.
        label_smoothing: the weight of the uniform distribution over the whole vocabulary.
        z_loss: the weight of the squared log of the softmax's denominator.
        packed: two messages; False sends the target's logits and the sums on their own.

    Raises:
        ValueError: `label_smoothing` outside of 0 to 1, `z_loss` below 0.
    """

    ignored: int = IGNORED
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
    """The loss of a batch, the same on every rank; each rank's gradient is that of its own logits.

    Args:
        logits: `logits_..V`; V: this rank's part of the vocabulary, which may be empty.
        targets: `targets_..`, the same on every rank.
        vocabulary_size: of all ranks.
        tp: the ranks (default: the world).
        options: default: ignored targets are -100, and nothing is added.
        reduction: "mean" divides by `num_tokens`, "sum" does not, "none" gives the loss of every token.
        num_tokens: of the step (default: the valid targets here); a batch without any has loss 0, and is not NaN.

    Raises:
        ValueError: a target that is no whole number or outside of the vocabulary; logits of another size than this
            rank's part.
    """
    tp, options = tp or TensorParallel(), options or LossOptions()
    _check(logits, targets, vocabulary_size, tp, options)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"a reduction is mean, sum or none, got {reduction!r}")
    losses: Tensor = CrossEntropy.apply(rows(logits), targets.reshape(-1), vocabulary_size, tp, options)
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
        wide = _wide(logits)
        largest = wide.amax(1) if wide.shape[1] else wide.new_full((len(wide),), -torch.inf)  # an empty part
        comm.all_reduce(largest, "max", tp.group)
        shifted = wide - largest[:, None]
        mine, place = _own_targets(targets, vocabulary_size, tp)
        parts = [_at(shifted, mine, place)]
        if options.label_smoothing:
            parts.append(shifted.sum(1))
        parts.append(shifted.exp_().sum(1))
        log_sum, at_target, shifted_sum = _summed(parts, tp, options)
        smoothing, log_z = options.label_smoothing, largest + log_sum
        likely = (1 - smoothing) * at_target + smoothing / vocabulary_size * shifted_sum
        losses = log_sum - likely + options.z_loss * log_z.square()
        ctx.save_for_backward(logits, largest, log_sum, targets)
        ctx.vocabulary_size, ctx.tp, ctx.options = vocabulary_size, tp, options
        return losses.masked_fill_(targets == options.ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, largest, log_sum, targets = ctx.saved_tensors
        smoothing, options = ctx.options.label_smoothing, ctx.options
        grad = _wide(grad).masked_fill(targets == options.ignored, 0.0)
        dz = (_wide(logits) - largest[:, None]).sub_(log_sum[:, None]).exp_()  # the softmax
        dz.mul_((grad * (1 + 2 * options.z_loss * (largest + log_sum)))[:, None])
        mine, place = _own_targets(targets, ctx.vocabulary_size, ctx.tp)
        dz[mine, place] -= (1 - smoothing) * grad[mine]
        if smoothing:
            dz.sub_((smoothing / ctx.vocabulary_size * grad)[:, None])
        return dz.to(logits.dtype), None, None, None, None


def _summed(parts: list[Tensor], tp: TensorParallel, options: LossOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Sum over the ranks: log of the denominator, the target's shifted logit, the sum of all shifted logits."""
    if options.packed:
        parts = list(start_sum(torch.stack(parts), tp.group).wait())
    else:
        parts = [pending.wait() for pending in [start_sum(part, tp.group) for part in parts]]
    shifted_sum = parts[1] if options.label_smoothing else torch.zeros_like(parts[0])
    return parts[-1].log(), parts[0], shifted_sum


def _own_targets(targets: Tensor, vocabulary_size: int, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """Which tokens have their target in this rank's part, and where in it."""
    start, stop = tp.span(vocabulary_size)
    mine = ((targets >= start) & (targets < stop)).nonzero().squeeze(1)
    return mine, targets[mine] - start


def _at(values: Tensor, mine: Tensor, place: Tensor) -> Tensor:
    found = values.new_zeros(len(values))
    found[mine] = values[mine, place]
    return found


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _check(logits: Tensor, targets: Tensor, vocabulary_size: int, tp: TensorParallel, options: LossOptions) -> None:
    start, stop = tp.span(vocabulary_size)
    if logits.shape != (*targets.shape, stop - start):
        raise ValueError(
            f"tokens {start} to {stop} of a vocabulary of {vocabulary_size} need logits of shape "
            f"{(*targets.shape, stop - start)} for targets of shape {tuple(targets.shape)}, got {tuple(logits.shape)}"
        )
    if targets.is_floating_point():
        raise ValueError(f"targets are whole numbers, got {targets.dtype}; use targets.long()")
    wrong = targets[((targets < 0) | (targets >= vocabulary_size)) & (targets != options.ignored)]
    if wrong.numel():
        raise ValueError(
            f"targets run from 0 to {vocabulary_size - 1}, got {int(wrong[0])}; only {options.ignored} is ignored"
        )
