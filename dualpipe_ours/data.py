"""Data parallel: the mean over the tokens of all ranks, as a sum of shares."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .ring import all_reduce


def num_tokens(targets: Tensor, ranks: list[int]) -> float:
    """How many targets (tokens,) of all ranks count; -100 does not."""
    count = (targets != -100).sum().double()
    all_reduce(count, ranks)
    return float(count)


def share_of_loss(logits: Tensor, targets: Tensor, total: float) -> Tensor:
    """This rank's share of the mean over `total` tokens, from logits (tokens, vocabulary)."""
    summed = cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    return summed / max(total, 1.0)  # where no token counts the sum is 0, and so is its share


def sum_gradients(parameters: Iterable[Tensor], ranks: list[int]) -> None:
    """Sum every gradient over the ranks; one that is missing counts as zeros."""
    for parameter in parameters:
        if parameter.grad is None:  # the others wait for this rank
            parameter.grad = torch.zeros_like(parameter)
        all_reduce(parameter.grad, ranks)
