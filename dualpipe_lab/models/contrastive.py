"""CLIP's contrastive loss with the negatives of all data ranks; forward, gather and backward by hand.

Chapter: book/pp/two-towers.  In: b pairs of features per rank, a scale.  Out: the mean loss of this rank's pairs.
Of n = N b pairs in all, pair k of rank r has number r b + k.  A rank holds two (b, n) matrices, not (n, n).  It
all-gathers (b, 2 d) numbers forward, and reduce-scatters (n, 2 d) backward.
The gradient is that of the sum of the ranks' losses; data parallelism averages it, which gives the mean over all pairs.
Elsewhere: open_clip `ClipLoss(local_loss=True, gather_with_grad=True)`; torch `all_gather` of `distributed.nn`.
Source: Radford et al. 2021 (arXiv 2103.00020), figure 3.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group


class _Contrastive(torch.autograd.Function):
    """Every image against every text, L = image @ all_texts^T * scale, and M likewise for texts against images.

    loss = (cross_entropy(L, own numbers) + cross_entropy(M, own numbers)) / 2;  P = (softmax(L) - one_hot) / 2b,
    Q likewise of M;  d_image = scale (P @ all_texts + own rows of the sum over ranks of Q^T @ text), d_text likewise.
    """

    @staticmethod
    def forward(ctx: Any, image: Tensor, text: Tensor, scale: Tensor, group: Group | None) -> Tensor:
        both = torch.cat([image, text], dim=1)
        everyone = _gather(both, group)
        width = image.shape[1]
        all_images, all_texts = everyone[:, :width], everyone[:, width:]
        products = torch.stack([image @ all_texts.t(), text @ all_images.t()])  # 2 b n
        own = _own_numbers(image, group)
        log_p = log_softmax(products * scale, dim=-1)
        ctx.save_for_backward(image, text, everyone, scale, products, log_p)
        ctx.group = group
        return -log_p[:, own - own[0], own].mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        image, text, everyone, scale, products, log_p = ctx.saved_tensors
        num_pairs, width = image.shape
        own = _own_numbers(image, ctx.group)
        wrong = log_p.exp()
        wrong[:, own - own[0], own] -= 1
        wrong = wrong * (grad / (2 * num_pairs))  # d loss / d logits, of images (P) and of texts (Q)
        p, q = wrong
        d_scale = (wrong * products).sum().reshape(scale.shape)
        to_others = torch.cat([q.t() @ text, p.t() @ image], dim=1)  # n, 2 d: as negatives of this rank's pairs
        returned = _scatter_sums(to_others, ctx.group)
        d_image = scale * (p @ everyone[:, width:] + returned[:, :width])
        d_text = scale * (q @ everyone[:, :width] + returned[:, width:])
        return d_image, d_text, d_scale, None


def contrastive_loss(image: Tensor, text: Tensor, scale: Tensor, group: Group | None = None) -> Tensor:
    """Return the mean loss of this rank's pairs; their negatives are all other pairs of the ranks of `group`.

    Args:
        image: (b, d) features of unit length; row k belongs to row k of `text`.
        text: (b, d).
        scale: one number that multiplies every product, e.g. `logit_scale.exp()`.
        group: the data ranks, each with b pairs of its own; None for the pairs of this process alone.

    Raises:
        ValueError: if the features are not two equal matrices, or the scale is not one number.

    >>> print(contrastive_loss(torch.eye(2), torch.eye(2), torch.tensor(0.0)))  # no scale: a guess among two
    tensor(0.6931)
    """
    if image.dim() != 2 or image.shape != text.shape or not len(image) or scale.numel() != 1:
        raise ValueError(
            f"contrastive_loss takes (b, d) images, (b, d) texts and one scale, got {tuple(image.shape)}, "
            f"{tuple(text.shape)} and {tuple(scale.shape)}; project both towers to one width"
        )
    loss: Tensor = _Contrastive.apply(image, text, scale, group)
    return loss


def _own_numbers(image: Tensor, group: Group | None) -> Tensor:
    """Return the numbers of this rank's pairs among those of all ranks."""
    first = 0 if group is None else comm.get_rank(group) * len(image)
    return torch.arange(first, first + len(image), device=image.device)


def _gather(local: Tensor, group: Group | None) -> Tensor:
    if group is None:
        return local
    full = local.new_empty(comm.get_world_size(group) * len(local), local.shape[1])
    comm.all_gather_single(full, local.contiguous(), group)
    return full


def _scatter_sums(full: Tensor, group: Group | None) -> Tensor:
    if group is None:
        return full
    local = full.new_empty(len(full) // comm.get_world_size(group), full.shape[1])
    comm.reduce_scatter_single(local, full.contiguous(), group=group)
    return local
