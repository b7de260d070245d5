"""Dynamic loss scaling: fp16 gradients neither underflow nor overflow, and all ranks decide alike to step or skip.

Chapter: book/dp/mixed-precision-adam.  In: a loss, gradients in fp16.  Out: a scaled loss; step, or skip.
  a gradient is not finite, on any rank    no rank steps; scale <- scale * backoff; count of good steps <- 0
  all are finite                           step; after `interval` good steps in a row scale <- scale * growth
  order                                    unscale -> norm -> clip -> step: `max_norm` refers to the unscaled gradient
bf16 has the range of fp32 and needs no scale, but it needs a master copy as fp16 does: `master=True`.
Elsewhere: torch.amp.GradScaler, which checks its own rank only (FSDP has a ShardedGradScaler).
Source: Micikevicius et al. 2018 (arXiv 1710.03740), sections 3.1 and 3.2.
"""

from collections.abc import Iterable, Sequence
from math import isfinite
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.launch.context import device

_STATE = ("scale", "growth", "backoff", "interval", "num_good_steps")


class LossScaler:
    """A dynamic loss scale, shared by all ranks; pass it to an optimizer's `step`.

    Args:
        scale: of the first step.
        growth, backoff: factors by which the scale grows and shrinks.
        interval: good steps in a row before the scale grows.
        groups: all groups over which ranks must decide alike: data, and tp, pp or ep where there are any
            (default: the world).

    Raises:
        ValueError: a factor on the wrong side of 1, a scale or an interval that is not positive.
    """

    def __init__(
        self,
        scale: float = 65536.0,
        *,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        groups: Sequence[Group | None] = (None,),
    ) -> None:
        if not (scale > 0 and growth > 1 and 0 < backoff < 1 and interval >= 1):
            raise ValueError(
                "a loss scaler needs scale > 0, growth > 1, backoff between 0 and 1 and interval of at least 1, "
                f"got scale={scale}, growth={growth}, backoff={backoff}, interval={interval}"
            )
        self.scale, self.growth, self.backoff, self.interval = scale, growth, backoff, interval
        self.num_good_steps, self._groups = 0, tuple(groups)
        self._owner: ReferenceType[object] | None = None

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale: the backward starts from it."""
        return loss * self.scale

    def belong_to(self, optimizer: object) -> None:
        """Let one optimizer use this scaler, the first one that asks, as long as it exists.

        Raises:
            ValueError: another optimizer does; the two would decide apart, and unscale by two scales in one step.
        """
        owner = self._owner() if self._owner else None
        if owner is not None and owner is not optimizer:
            raise ValueError(
                "a loss scaler belongs to one optimizer, got a second: each would choose the next scale, one before "
                "the other has unscaled its gradients; give one optimizer the full model, with a Mesh for its groups"
            )
        self._owner = ref(optimizer)

    def found_inf(self, gradients: Iterable[Tensor]) -> bool:
        """Return whether any rank has a gradient with an element that is not finite; the same on every rank."""
        flags = [grad.isfinite().logical_not().any() for grad in gradients]
        found = torch.stack(flags).any().long() if flags else torch.zeros((), device=device()).long()
        for group in self._groups:
            comm.all_reduce(found, "max", group)
        return bool(found)  # the host waits for this number alone, and not for each gradient's

    def update(self, found_inf: bool) -> None:
        """Choose the scale of the next step: shrink after `found_inf`, grow after `interval` good steps."""
        if found_inf:
            self.scale, self.num_good_steps = self.scale * self.backoff, 0
            return
        self.num_good_steps += 1
        if self.num_good_steps == self.interval:
            grown = self.scale * self.growth
            self.scale, self.num_good_steps = (grown if isfinite(grown) else self.scale), 0

    def state_dict(self) -> dict[str, float]:
        """Return all numbers, so that a resumed run continues with the same scales."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue with the numbers of `state_dict`."""
        for name in _STATE:
            setattr(self, name, state[name])
