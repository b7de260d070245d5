"""`Synchronizer`: the calls by which a pipeline tells a reducer when gradients are complete; pp and dp meet here.

Chapter: book/pp/dualpipe.  In: the parameters of a stage.  Out: sums that are launched when a gradient is complete.
Without a pipeline, one run of torch's autograd engine is the backward of one microbatch.  In a pipeline a microbatch
has one backward per stage, W runs the engine once per group of parameters or not at all, and a stage with a mirror is
complete only when both copies have been added.  A reducer cannot count backwards there.  Instead, the runtime finds the
reducers of its stages by the hooks on their parameters, and calls them.
Elsewhere: torch's pipelining calls `set_requires_gradient_sync` of FSDP; Megatron `finalize_model_grads_func`.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple
from weakref import WeakMethod, ref

from torch import Tensor, nn

from dualpipe_lab._private import post_accumulate_grad_hooks
from dualpipe_lab.comm.groups import Group


class GradShard(NamedTuple):
    """A shard of a gradient: flat values, of which the first is element `start` of the parameter."""

    start: int
    values: Tensor


class Absent:
    """Base of weights that have no values on this rank now: those of ZeRO-3, outside of their unit."""

    __slots__ = ()


class Synchronizer:
    """Base of the reducers, which sum the gradients of some parameters over a group of ranks.

    Attributes:
        group: the ranks of the sum.
        name: of the optimizer, for error messages.
        is_sharded: whether a rank keeps only its shard of each sum.
        sums_tied: whether the optimizer adds a weight that several stages hold, once its sums are complete.
        sums_partial: whether it then adds gradients that layers left partial.
        num_backwards: of a step; 0 where nobody says.
        divisor: of the sums, by the optimizer; the data ranks of a mean.
        is_final: whether the sums of this step are complete, so that no backward may add to them.
        pipeline: the ranks of the pipeline that ran its stages last.
        lone_copies: the stages with copies on other ranks whose gradients nobody has added yet.
        num_hooks: how many hooks it has put on activations so far; all others are the user's.
    """

    group: Group | None
    name = ""
    is_sharded = False
    num_backwards = 0
    divisor = 1
    sums_tied = sums_partial = is_final = False
    pipeline: Collection[int] = ()
    lone_copies: Collection[int] = ()
    num_hooks = 0

    def check_stage(self, module: nn.Module, parameters: Collection[nn.Parameter]) -> None:
        """Raise ValueError if the gradients of a stage cannot be summed; `parameters` are those managed here."""

    def begin_step(self, stages: Collection[Collection[nn.Parameter]], num_microbatches: int) -> None:
        """Begin a step in which a pipeline with these stages says when gradients are complete."""

    def begin_backward(self, parameters: Collection[nn.Parameter], is_last: bool) -> None:
        """Expect the gradients of one stage and microbatch; if `is_last`, they are complete when computed.

        The backward is B or W: gradients that I makes count with W.
        """

    def hold(self, parameters: Collection[nn.Parameter]) -> None:
        """Have the full weights of a stage that runs in pieces until `release`, once for every call."""

    def release(self, parameters: Collection[nn.Parameter]) -> None:
        """End one `hold`; with the last one the full weights may go."""

    def before_weight_grad(self, parameter: nn.Parameter, is_made: bool) -> None:
        """Prepare for the part of a W that computes a parameter's gradient, or adds it if I has made it (`is_made`)."""

    def end_backward(self, parameters: Collection[nn.Parameter]) -> None:
        """End the backward of one stage and microbatch: its gradients have been computed."""

    def ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """Declare the gradients of these parameters complete, mirrors included."""

    def weight_grad_order(self, parameter: nn.Parameter) -> int:
        """Return the place of a parameter in the order of a W: lower ones come first."""
        return 0

    def grad_shards(self) -> dict[nn.Parameter, GradShard] | None:
        """Return this rank's shard of each gradient; None if `.grad` is the full one until the sums begin."""
        return None

    def check_open(self) -> None:
        """Raise ValueError for a backward after the sums of its step."""
        if self.is_final:
            raise ValueError(
                "a backward adds to gradients that are summed already; call zero_grad() of the optimizer, or zero() of "
                "a reducer, before it: the module's own zero_grad() does not reach them"
            )

    def outside_of_backwards(self) -> str:
        """Return the sentence for gradients that no backward of this reducer's has announced."""
        return (
            f"{self.name} has got gradients that belong to no backward, as one that raised leaves them, or W outside "
            "of autograd's engine; after an exception call zero_grad() of the optimizer, and for W run the stages "
            "with a PipelineRuntime, and nothing else in the same step"
        )

    def check_addition(self, parameters: Collection[nn.Parameter]) -> None:
        """Raise ValueError if nothing can be added to these gradients now, because their sum has been launched."""


class AccumulationHook:
    """Calls a method without keeping its object alive: Python's garbage collector cannot see through torch's hooks."""

    def __init__(self, method: Callable[[nn.Parameter], None], owner: Callable[[], Synchronizer | None]) -> None:
        self._method, self.owner = WeakMethod(method), owner

    def __call__(self, parameter: nn.Parameter) -> None:
        """Call the method, if its object still exists."""
        method = self._method()
        if method is not None:
            method(parameter)


def register_grad_hook(
    parameter: nn.Parameter, method: Callable[[nn.Parameter], None], owner: Synchronizer | None = None
) -> Any:
    """Call a method whenever a backward has added to the parameter's gradient; return the handle that removes it.

    A pipeline finds the `owner` by this hook and tells it when gradients are complete.
    """
    hook = AccumulationHook(method, ref(owner) if owner is not None else lambda: None)
    return parameter.register_post_accumulate_grad_hook(hook)


def synchronizers_of(parameter: Tensor) -> list[Synchronizer]:
    """Return the reducers that sum the gradient of a parameter: in most cases none, or one."""
    owners = [hook.owner() for hook in post_accumulate_grad_hooks(parameter) if isinstance(hook, AccumulationHook)]
    return [owner for owner in owners if owner is not None]


def grad_shards_of(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, GradShard | None]:
    """Return this rank's shards of gradients that are sharded during the backwards; None for an empty shard."""
    owners = {parameter: synchronizers_of(parameter) for parameter in parameters}
    found = {owner: owner.grad_shards() for owner in dict.fromkeys(owner for each in owners.values() for owner in each)}
    return {
        parameter: held.get(parameter)
        for parameter, each in owners.items()
        for owner in each
        if (held := found[owner]) is not None
    }
