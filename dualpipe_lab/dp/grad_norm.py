"""The norm of the full gradient, of which each rank has shards, and clipping by it.

Chapter: book/dp/mixed-precision-adam.  In: gradients, each with the axes it is sharded over.  Out: their norm.
  norm        (sum of |g|^p over all ranks' distinct elements)^(1/p)          p = infinity: the largest |g|
  clipping    g <- g * min(1, max_norm / (norm + 1e-6))
  messages    one all-reduce of 2^(number of axes) numbers per axis, on the device of the gradients
Powers add up over shards, norms do not: four 1s on one rank and four 2s on another have norm sqrt(4 + 16) = 4.4721,
and the sum of their norms is 6.  A gradient that is replicated along an axis is not summed along it, so it counts
once.
Elsewhere: `torch.nn.utils.clip_grad_norm_`; Megatron clip_grads.py.
"""

from collections.abc import Collection, Mapping, Sequence
from math import inf

import torch
from torch import Tensor

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.launch.context import device


def global_norm(
    gradients: Sequence[tuple[Tensor, Collection[str]]], groups: Mapping[str, Group | None], p: float = 2.0
) -> float:
    """Return the p-norm of the gradient of the full model; the same on every rank.

    Args:
        gradients: pairs of a gradient of this rank and the axes it is a shard along; it is replicated along the others.
            A rank may have none.  A tied parameter is listed once, on one of its stages.
        groups: this rank's group along each axis, in the same order on every rank.
        p: above 0; `math.inf` for the largest element, which is infinite if one is NaN.

    Raises:
        ValueError: `p` is not above 0, or a gradient names an axis without a group.
    """
    if not p > 0:
        raise ValueError(f"a norm needs p > 0, got {p}; use 2.0 or math.inf")
    axes = list(groups)
    where = gradients[0][0].device if gradients else device()
    powers = torch.zeros(2 ** len(groups), dtype=torch.float64, device=where)
    for grad, sharded in gradients:
        if not set(sharded) <= set(axes):
            raise ValueError(f"a gradient is sharded over {sorted(sharded)}, and groups are given for {axes}")
        index = sum(2 ** axes.index(axis) for axis in sharded)  # gradients with the same axes add up in one number
        local = _power(grad, p).to(torch.float64)
        if p == inf:  # a NaN is neither above nor below another number: GLOO's maximum would lose it
            local = torch.where(local.isnan(), inf, local)
        powers[index] = torch.maximum(powers[index], local) if p == inf else powers[index] + local
    for bit, axis in enumerate(axes):
        is_sharded = torch.arange(len(powers), device=where) & 2**bit > 0
        part = torch.where(is_sharded, powers, 0.0)
        comm.all_reduce(part, "max" if p == inf else "sum", groups[axis])
        powers = torch.where(is_sharded, part, powers)
    # the one number that the host waits for: every rank decides by it whether to step
    return float(powers.max() if p == inf else powers.sum() ** (1 / p))


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Return the factor that brings the norm of the gradients down to `max_norm`; 1 if `max_norm` is None.

    No factor repairs gradients whose norm is not finite: the factor of NaN is NaN, and that of infinity is 0.  The
    optimizers of this package skip such a step.

    >>> clip_factor(4.0, 8.0), round(clip_factor(4.0, 1.0), 6), clip_factor(float("nan"), 1.0)
    (1.0, 0.25, nan)

    Raises:
        ValueError: if `max_norm` is not above 0.
    """
    if max_norm is None:
        return 1.0
    if not max_norm > 0:
        raise ValueError(f"clipping needs max_norm > 0, got {max_norm}; leave it out for no clipping")
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor > 1 else factor  # not min(), which takes NaN for a number above 1


def _power(grad: Tensor, p: float) -> Tensor:
    """Return the sum of |g|^p of one tensor, or the largest |g|; 16-bit gradients are summed in fp32."""
    if not grad.numel():
        return grad.new_zeros(())
    wide = grad.detach() if grad.dtype in (torch.float32, torch.float64) else grad.detach().float()
    return wide.abs().max() if p == inf else wide.abs().pow(p).sum() if p != 2 else wide.square().sum()
