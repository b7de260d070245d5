"""`Synchronizer`: what a pipeline tells those who sum gradients over the data ranks.

Chapter: book/pp/dualpipe.  In: the parameters of a stage.  Out: sums that begin when a gradient is complete.
A backward of torch's engine is a microbatch only where no pipeline runs.  In a pipeline a microbatch has one backward
per stage; W runs the engine once per group of parameters, or not at all; and a stage with a mirror is complete only
when both copies have been added.  So nobody counts there: the runtime finds, by the hooks on their parameters, who
sums the gradients of its stages, and tells them
  begin_step        that it leads from here on
  begin_backward    B or W of one stage and microbatch begins (I leaves gradients that count with W)
  end_backward      ... and is over
  ready             no gradient of this stage is to come, mirrors included
Elsewhere: torch's pipelining calls `set_requires_gradient_sync` of FSDP; Megatron `finalize_model_grads_func`.
"""

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple
from weakref import WeakMethod

from torch import Tensor, nn

from dualpipe_lab._private import post_accumulate_grad_hooks
from dualpipe_lab.comm.groups import Group


class Piece(NamedTuple):
    """Some elements of a gradient, flat, from element `start` on."""

    start: int
    values: Tensor


class Synchronizer:
    """Sums the gradients of some parameters over a group of ranks.

    Attributes:
        group: the ranks that it sums over.
        is_sharded: whether a rank keeps a part of each sum alone.
    """

    group: Group | None
    is_sharded = False

    def check_stage(self, module: nn.Module, parameters: Collection[nn.Parameter]) -> None:
        """Refuse to work for a stage, of which `parameters` are managed here."""

    def begin_step(self, stages: Collection[Collection[nn.Parameter]]) -> None:
        """Let a pipeline with these stages say when gradients are complete, until the step is over."""

    def begin_backward(self, parameters: Collection[nn.Parameter], is_last: bool) -> None:
        """Await the gradients of one stage and microbatch; the last ones are complete as soon as they are made."""

    def before_weight_grad(self, parameter: nn.Parameter, is_made: bool) -> None:
        """Make ready for the part of a W that computes the gradient of this parameter, or adds what I has made."""

    def end_backward(self, parameters: Collection[nn.Parameter]) -> None:
        """Take note that the gradients of one stage and microbatch have been made."""

    def ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take note that the gradients of these parameters are complete, however they were made."""

    def turn(self, parameter: nn.Parameter) -> int:
        """The place that a parameter should have in the order of a W: lower ones come first."""
        return 0

    def pieces(self) -> dict[nn.Parameter, Piece] | None:
        """By parameter, what this rank holds of the gradient; None if `.grad` has all of it until the sums begin."""
        return None

    def check_addition(self, parameters: Collection[nn.Parameter]) -> None:
        """Raise ValueError if nothing can be added to these gradients now, because they are on their way."""


class AccumulationHook:
    """Calls a method whenever a backward has added to the gradient of a parameter.

    The parameter does not keep the method's object alive: the collector cannot see through torch's hooks, and an
    object that refers to the parameter would never be freed.
    """

    def __init__(self, method: Callable[[nn.Parameter], None], owner: Callable[[], Synchronizer | None]) -> None:
        self._method, self.owner = WeakMethod(method), owner

    def __call__(self, parameter: nn.Parameter) -> None:
        """Call the method, if its object still exists."""
        method = self._method()
        if method is not None:
            method(parameter)


def accumulation_hooks(parameter: Tensor) -> list[Callable[[Tensor], None]]:
    """What torch calls when a backward has added to a gradient."""
    return post_accumulate_grad_hooks(parameter)


def synchronizers_of(parameter: Tensor) -> list[Synchronizer]:
    """Who sums the gradient of a parameter: nobody, in most cases, or one."""
    owners = [hook.owner() for hook in accumulation_hooks(parameter) if isinstance(hook, AccumulationHook)]
    return [owner for owner in owners if owner is not None]


def pieces_of(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Piece | None]:
    """What this rank holds of the gradients that are sharded while the backwards run; None: nothing of this one."""
    owners = {parameter: synchronizers_of(parameter) for parameter in parameters}
    found = {owner: owner.pieces() for owner in dict.fromkeys(owner for each in owners.values() for owner in each)}
    return {
        parameter: held.get(parameter)
        for parameter, each in owners.items()
        for owner in each
        if (held := found[owner]) is not None
    }
