"""`ShardedOptimizer`: what ZeRO-1, ZeRO-2, ZeRO-3 and plain data parallelism have in common.

Chapter: book/dp/zero-1.  In: a module, a group of N ranks.  Out: the step that all of them take.
  finish the sums -> unscale -> norm of the whole gradient -> clip -> AdamW on the own shard -> publish the weights
Parameters that share type, hyperparameters and axes lie in one flat buffer, so that a shard's border may fall inside of
a parameter without mixing up learning rates.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.dp.adam import AdamShard, Hyper, HyperOf
from dualpipe_lab.dp.buckets import BUCKET_BYTES, Bucket
from dualpipe_lab.dp.data_parallel import broadcast_module
from dualpipe_lab.dp.grad_norm import clip_factor, global_norm


class Scaler(Protocol):
    """What a step asks of a loss scaler."""

    scale: float

    def found_inf(self, gradients: Iterable[Tensor]) -> bool:
        """Whether any rank has a gradient that is not finite."""

    def update(self, found_inf: bool) -> None:
        """Choose the scale of the next step."""


@dataclass(frozen=True)
class Options:
    """What is the same for every stage of ZeRO.

    Args:
        hyper: the numbers of AdamW, or a function of a parameter's name and value that gives them.
        master: keep fp32 weights for 16-bit parameters.
        rounding_seed: instead, round bf16 weights at random, from this seed.
        grad_dtype: the type in which gradients accumulate and travel (default: that of the parameters).
        bucket_bytes: how much travels together.
        num_backwards: backward passes of a step, one for each microbatch.  A `PipelineRuntime` says itself when a
            gradient is complete, whatever it runs on this rank, and this number plays no part.
        replicas: ranks that hold the same shard; their gradients are summed once per step.
        axes_of: the axes of `norm_groups` that a parameter is a shard along, by its name and value (default: all);
            None if the norm leaves it out, because another rank counts the same gradient.
        norm_groups: this rank's groups along the model's own axes (tp, pp, ep); the norm spans them.
    """

    hyper: Hyper | HyperOf = field(default_factory=Hyper)
    master: bool = False
    rounding_seed: int | None = None
    grad_dtype: torch.dtype | None = None
    bucket_bytes: int = BUCKET_BYTES
    num_backwards: int = 1
    replicas: Group | None = None
    axes_of: Callable[[str, nn.Parameter], Collection[str] | None] | None = None
    norm_groups: Mapping[str, Group | None] = field(default_factory=dict)


class Kind(NamedTuple):
    """Parameters of one kind may share a buffer."""

    dtype: torch.dtype
    hyper: Hyper
    axes: frozenset[str] | None


@dataclass
class Held:
    """Elements `first` to `last` of a bucket, with their optimizer state: what this rank updates."""

    bucket: Bucket
    first: int
    last: int
    adam: AdamShard
    axes: frozenset[str] | None


@dataclass(frozen=True)
class StepReport:
    """What a step found.

    Attributes:
        stepped: False if the norm was not finite or, with a scaler, a gradient on any rank: then no rank has moved.
            A step with neither `max_norm` nor a scaler does not look.
        norm: of the whole gradient, before clipping; None if nobody asked for it.
    """

    stepped: bool
    norm: float | None


class ShardedOptimizer:
    """AdamW whose state is dealt out to the ranks of a group; the stages differ in what else is.

    Raises:
        ValueError: ranks of the group hold other experts, or other parts of a layer, than this one.
    """

    is_sharded = True  # whether `held` is a part of what the group holds, or all of it

    def __init__(self, module: nn.Module, group: Group | None, options: Options) -> None:
        for copies in (group,) if options.replicas is None else (group, options.replicas):
            broadcast_module(module, copies)
        self.module, self.group, self.options = module, group, options
        self.group_rank, self.group_size = comm.get_rank(group), comm.get_world_size(group)
        self.names = {parameter: name for name, parameter in module.named_parameters()}
        self.num_steps, self.num_backwards = 0, options.num_backwards
        self.generator: torch.Generator | None = None
        if options.rounding_seed is not None:  # ranks that hold the same weights must round them alike
            self.generator = torch.Generator().manual_seed(options.rounding_seed + self.group_rank * self.is_sharded)
        self.held: list[Held] = []
        self._final: list[Tensor] | None = None  # the finished gradients, until zero_grad

    def step(
        self,
        lr_factor: float = 1.0,
        max_norm: float | None = None,
        scaler: Scaler | None = None,
        norm_type: float = 2.0,
        norm: float | None = None,
    ) -> StepReport:
        """Finish the gradients and update the weights of this rank's shards; then every rank has all of them.

        Args:
            lr_factor: multiplies every learning rate.
            max_norm: clip the gradient to this norm.
            scaler: the loss scaler whose scale the loss was multiplied by.
            norm_type: p of the norm.
            norm: of the whole gradient, scaled as the loss was, where this optimizer holds only a part of the model:
                that of two is `math.hypot(dense.grad_norm(), experts.grad_norm())`.
        """
        gradients = self.finished_gradients()
        if scaler is not None and scaler.found_inf(gradients):
            scaler.update(True)
            return StepReport(False, None)
        scale = 1.0 / scaler.scale if scaler is not None else 1.0
        if max_norm is not None or norm is not None:
            norm = self._norm(gradients, norm_type) if norm is None else norm
            norm *= scale  # unscaled before it is compared with max_norm
            if not isfinite(norm):  # the same on every rank, so no rank moves
                if scaler is not None:
                    scaler.update(True)
                return StepReport(False, norm)
            scale *= clip_factor(norm, max_norm)
        self.num_steps += 1
        for held, grad in zip(self.held, gradients, strict=True):
            held.adam.step(grad, self.num_steps, lr_factor, scale)
        if scaler is not None:
            scaler.update(False)
        self.publish()
        return StepReport(True, norm)

    def finished_gradients(self) -> list[Tensor]:
        """This rank's shards of the summed gradient, one tensor for each of `held`; the sums are finished first."""
        if self._final is not None:
            return self._final
        self._final = self._gradients()
        if self.options.replicas is not None:
            works = [comm.all_reduce(grad, group=self.options.replicas, async_op=True) for grad in self._final]
            for work in works:
                assert work is not None
                work.wait()
        return self._final

    def grad_norm(self, p: float = 2.0) -> float:
        """The norm of the finished gradient of the whole model."""
        return self._norm(self.finished_gradients(), p)

    def zero_grad(self, num_backwards: int | None = None) -> None:
        """Set the gradients to zero; due before the first backward after a step.

        Args:
            num_backwards: of the coming step, if it has other than `Options.num_backwards`: a last, partial one.
        """
        self._final = None
        self.num_backwards = self.options.num_backwards if num_backwards is None else num_backwards
        self._zero()

    def publish(self) -> None:
        """Give every rank the weights that this rank updated, where they are held whole."""
        raise NotImplementedError

    @property
    def padded_numel(self) -> int:
        """Trained elements of the whole model, with the padding of each buffer: what the closed forms count."""
        return sum(held.bucket.layout.padded_numel for held in self.held)

    def kind(self, parameter: nn.Parameter) -> Kind:
        """What a parameter must have in common with its neighbours in a buffer."""
        options, name = self.options, self.names[parameter]
        hyper = options.hyper if isinstance(options.hyper, Hyper) else options.hyper(name, parameter)
        axes = options.axes_of(name, parameter) if options.axes_of else options.norm_groups
        return Kind(parameter.dtype, hyper, None if axes is None else frozenset(axes))

    def _zero(self) -> None:
        """Set the gradients to zero."""
        raise NotImplementedError

    def _gradients(self) -> list[Tensor]:
        """The sum over the group of this rank's shards, one tensor for each of `held`."""
        raise NotImplementedError

    def _check_open(self) -> None:
        """Refuse to add to gradients that are summed already.

        Raises:
            ValueError: since the last step, nobody called zero_grad.
        """
        if self._final is not None:
            raise ValueError("a backward adds to gradients that are summed already; call zero_grad() before it")

    def _norm(self, gradients: list[Tensor], p: float) -> float:
        groups = {**self.options.norm_groups, "shard": self.group}
        parts = [
            (grad, held.axes | {"shard"} if self.is_sharded else held.axes)
            for held, grad in zip(self.held, gradients, strict=True)
            if held.axes is not None
        ]
        return global_norm(parts, groups, p)

    def _hold(self, bucket: Bucket, working: Tensor, first: int, last: int) -> Held:
        """Make the optimizer state of a part of a bucket."""
        kind = self.kind(bucket.parameters[0])
        master = self.options.master and working.element_size() == 2  # fp32 weights are their own masters
        generator = self.generator if working.dtype == torch.bfloat16 else None
        return Held(bucket, first, last, AdamShard(working, kind.hyper, master, generator), kind.axes)


def flatten(bucket: Bucket) -> Tensor:
    """Move a bucket's parameters into one flat buffer, of which each then is a view."""
    dtype = bucket.parameters[0].dtype
    flat = torch.zeros(bucket.layout.padded_numel, dtype=dtype, device=bucket.device)
    for parameter, view in zip(bucket.parameters, bucket.views(flat), strict=True):
        view.copy_(parameter.detach())
        parameter.data = view
    return flat
