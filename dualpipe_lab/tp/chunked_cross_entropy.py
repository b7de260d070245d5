"""Cross-entropy without whole logits: the head and its loss over chunks of tokens, one chunk's logits at a time.

Chapter: book/tp/chunked-loss.  In: the head's input `x_..SD`, this rank's rows of its weight, all targets.
Out: the loss.
The other way computes dx and dW in the forward, with 3 products of 2 T h V / t operations where this one has 4.  It
keeps dW, h V / t numbers, for every microbatch in flight, needs the gradient of the loss to be one number for all
tokens, and waits for the ranks' sums once per chunk.
Elsewhere: Cut Cross-Entropy recomputes within a kernel; Liger `LigerFusedLinearCrossEntropyLoss` has both gradients in
the forward, torch 2.13 `linear_cross_entropy` too; torchtune `LinearCrossEntropyLoss`.
Source: Wijmans et al. 2024 (arXiv 2411.09009), section 4; the rescaled sums: Milakov and Gimelshein 2018
(arXiv 1805.02867).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from dualpipe_lab import comm
from dualpipe_lab.tp.cross_entropy import Reduction, TokenLoss
from dualpipe_lab.tp.linear import at_least_float32, check_tokens, flat_tokens
from dualpipe_lab.tp.mappings import TOKENS, all_gather_async, input_sum_async
from dualpipe_lab.tp.shard import TensorParallel


def chunked_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocabulary_size: int,
    chunk: int,
    tp: TensorParallel | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    num_tokens: int | None = None,
) -> Tensor:
    """Compute the loss of a batch, the same on every rank, from the input of the head.

    Args:
        x: `x_..SD`, the same on every rank; under sequence parallelism the rank's tokens.
        weight: `weight_VD`; V: this rank's shard of the vocabulary, which may be empty.
        targets: `targets_..S` of all tokens, the same on every rank.
        vocabulary_size: of all ranks.
        chunk: tokens whose logits exist at the same time; the last chunk may have fewer.
        tp: the ranks (default: the world).
        ignore_index: as in `cross_entropy`.
        label_smoothing: as in `cross_entropy`.
        reduction: as in `cross_entropy`.
        num_tokens: as in `cross_entropy`.

    Raises:
        ValueError: a chunk of less than one token; as `cross_entropy`, for targets and the shard of the weight.
    """
    loss = TokenLoss(tp or TensorParallel(), vocabulary_size, ignore_index, label_smoothing)
    _check(x, weight, targets, chunk, loss)
    loss.check(targets, reduction)
    losses: Tensor = ChunkedCrossEntropy.apply(x, weight, targets.reshape(-1), chunk, loss)
    return loss.reduced(losses, targets, reduction, num_tokens)


class ChunkedCrossEntropy(torch.autograd.Function):
    """The loss of every token, `losses_T` of `x_..SD`, `weight_VD` and `targets_T`.

    For the backward x, the targets and 2 numbers per token are kept.  At its peak there are c V / t logits instead of
    T V / t, in the backward dW and dx too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, loss: TokenLoss) -> Tensor:
        tp = loss.tp
        full = all_gather_async(x, TOKENS, tp.group).wait() if tp.sequence_parallel else x
        rows, ctx.parts = flat_tokens(full), _parts(targets, chunk, loss.ignore_index)
        numbers = at_least_float32(full.new_empty(0)).new_ones(4, len(targets))  # of a skipped chunk: 1
        for part in ctx.parts:
            z = at_least_float32(linear(rows[part], weight))
            numbers[:, part] = _numbers(z, *loss.local_targets(targets[part]))
            del z  # before the next chunk's is made
        # the only messages of the loss: three numbers per token, in two collectives, as many as the plain loss
        largest = numbers[0].clone()
        comm.all_reduce(largest, "max", tp.group)
        summands = _shifted(numbers, largest, loss.local_targets(targets)[0], len(weight))
        if not loss.label_smoothing:
            del summands[1]
        losses, log_sum = loss.of_sums(summands, targets)
        kept = x if tp.regather else full
        ctx.save_for_backward(kept, weight, largest, log_sum, targets)
        ctx.loss = loss
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, largest, log_sum, targets = ctx.saved_tensors
        tp, (needs_dx, needs_dw, *_) = ctx.loss.tp, ctx.needs_input_grad
        full = all_gather_async(x, TOKENS, tp.group).wait() if tp.sequence_parallel and tp.regather else x
        rows = flat_tokens(full)
        dx = full.new_zeros(full.shape) if needs_dx else None
        dw = at_least_float32(weight.new_zeros(weight.shape)) if needs_dw else None
        summing = None
        for part in ctx.parts:
            z = at_least_float32(linear(rows[part], weight)).sub_(largest[part, None])
            dz = ctx.loss.logits_grad(z, log_sum[part], targets[part], grad[part]).to(weight.dtype)
            if dx is not None:
                dx.view(-1, dx.shape[-1])[part] = dz @ weight
                if part == ctx.parts[-1]:
                    summing = input_sum_async(dx, tp)  # while dW of this chunk is computed
            if dw is not None:
                dw += dz.t() @ rows[part]
            del z, dz  # before the next chunk's are made
        if dx is not None:
            dx = (summing or input_sum_async(dx, tp)).wait()
        return dx, None if dw is None else dw.to(weight.dtype), None, None, None


def _parts(targets: Tensor, chunk: int, ignored: int) -> list[slice]:
    """Return the chunks that have a target, the same on every rank; on a GPU the host waits once for all of them."""
    has_target = [bool(part.any()) for part in (targets != ignored).cpu().split(chunk)]
    starts = range(0, len(targets), chunk)
    return [slice(start, start + chunk) for start, found in zip(starts, has_target, strict=False) if found]


def _numbers(z: Tensor, local: Tensor, column: Tensor) -> Tensor:
    """Return four numbers per token of a chunk, with z' = z - this rank's largest: it, z' of the target, two sums.

    `numbers_4C` of `z_CV`, which becomes exp(z'); the sums are those of z' and of exp(z').
    """
    numbers = z.new_zeros(4, len(z))
    if not z.shape[1]:  # an empty shard
        numbers[0] = -torch.inf
        return numbers
    numbers[0] = z.amax(1)
    shifted = z.sub_(numbers[0][:, None])
    numbers[1, local] = shifted[local, column]
    numbers[2] = shifted.sum(1)
    numbers[3] = shifted.exp_().sum(1)
    return numbers


def _shifted(numbers: Tensor, largest: Tensor, local: Tensor, num_columns: int) -> list[Tensor]:
    """Return the last three numbers of every token for z' = z - the largest of all ranks."""
    here, at_target, shifted_sum, exp_sum = numbers
    distance = here - largest  # at most 0; of an empty shard -inf
    at_target[local] += distance[local]
    if num_columns:
        shifted_sum += num_columns * distance
    return [at_target, shifted_sum, exp_sum * distance.exp()]


def check_chunk(chunk: int) -> None:
    """Refuse a chunk that is not a number of tokens."""
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"a chunk is a number of tokens of at least 1, got {chunk!r}; use 1024")


def _check(x: Tensor, weight: Tensor, targets: Tensor, chunk: int, loss: TokenLoss) -> None:
    check_tokens(x)
    check_chunk(chunk)
    start, stop = loss.tp.span(loss.vocabulary_size)
    if weight.shape != (stop - start, x.shape[-1]):
        raise ValueError(
            f"tokens {start} to {stop} of a vocabulary of {loss.vocabulary_size} need a weight of shape "
            f"{(stop - start, x.shape[-1])} for {x.shape[-1]} features, got {tuple(weight.shape)}"
        )
    num_shards = loss.tp.size if loss.tp.sequence_parallel else 1
    tokens = (*x.shape[:-2], x.shape[-2] * num_shards)
    if targets.shape != tokens:
        raise ValueError(f"x of shape {tuple(x.shape)} needs targets of shape {tokens}, got {tuple(targets.shape)}")
