"""`ShardedAdam` and `ShardedOptimizer`: what ZeRO-1, ZeRO-2, ZeRO-3 and plain data parallelism have in common.

Chapter: book/dp/zero-1.  In: a module, a group of N ranks.  Out: an optimizer; each stage writes its own `step`:
  reduce-scatter the gradients -> unscale -> norm of the full gradient -> clip -> AdamW on the local shard -> all-gather
Each stage is composed of a reducer, which sums the gradients over the ranks, and a `ShardedAdam`, which updates shards.
Parameters that share type, hyperparameters and axes lie in one flat buffer, so that a shard may begin or end inside of
a parameter without mixing up learning rates.
Elsewhere: `full_weights` and `full_gradients` are FSDP2 `DTensor.full_tensor`, DeepSpeed `safe_get_full_grad`.
"""

import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab._private import version_of
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.dp.adam import AdamShard, Hyperparameters, HyperparametersOf
from dualpipe_lab.dp.buckets import BUCKET_BYTES, Bucket, local_shard
from dualpipe_lab.dp.declaration import Declaration
from dualpipe_lab.dp.grad_norm import clip_factor, global_norm
from dualpipe_lab.dp.mixed_precision import LossScaler
from dualpipe_lab.launch.mesh import GroupMesh, Mesh
from dualpipe_lab.pp.program import Program


@dataclass(frozen=True)
class ZeroOptions:
    """The options that every stage of ZeRO takes.

    Args:
        hyperparameters: of AdamW, or a function that returns them for a parameter and its name in the full model.
        master: keep fp32 weights for 16-bit parameters.
        rounding_seed: instead, round bf16 weights at random, from this seed.
        grad_dtype: the type in which gradients accumulate and travel (default: that of the parameters).
        bucket_bytes: the largest size of a bucket.
        num_backwards: backward passes of a step, one for each microbatch.  A call of `PipelineRuntime.step` has all its
            microbatches, whatever this says; for an update after several calls, give the microbatches of all together.
        hybrid: shard within the nodes of a `Mesh` and replicate across them.
    """

    hyperparameters: Hyperparameters | HyperparametersOf = field(default_factory=Hyperparameters)
    master: bool = False
    rounding_seed: int | None = None
    grad_dtype: torch.dtype | None = None
    bucket_bytes: int = BUCKET_BYTES
    num_backwards: int = 1
    hybrid: bool = False


@dataclass(frozen=True)
class StepReport:
    """The result of a step.

    Attributes:
        stepped: False if the norm was not finite or, with a scaler, a gradient on any rank: then no rank has updated
            its weights.  A step with neither `max_norm` nor a scaler does not check.
        norm: of the full gradient, before clipping; None if it was not computed.
    """

    stepped: bool
    norm: float | None


class Kind(NamedTuple):
    """What parameters must have in common to share a buffer: a param group of torch.optim, of one type and copies."""

    dtype: torch.dtype
    hyperparameters: Hyperparameters
    declared: frozenset[str]


@dataclass
class LocalShard:
    """Elements `start` to `stop` of a bucket, with their optimizer state: what this rank updates.

    Of all ranks that update the same elements, `counts` is true on the one whose gradient is in the norm.
    """

    bucket: Bucket
    start: int
    stop: int
    adam: AdamShard
    counts: bool

    def __post_init__(self) -> None:
        self._versions = [version_of(parameter) for parameter in self.bucket.parameters]

    def take_changes(self) -> None:
        """Copy weights that somebody has changed in place, as load_state_dict() does, to their fp32 masters."""
        versions = [version_of(parameter) for parameter in self.bucket.parameters]
        if versions != self._versions and self.adam.weight is not self.adam.working:
            for part in self.bucket.layout.tensors_between(self.start, self.stop):
                if versions[part.tensor] != self._versions[part.tensor]:
                    begin = self.bucket.layout.offsets[part.tensor] + part.start - self.start
                    span = slice(begin, begin + part.stop - part.start)
                    self.adam.weight[span] = self.adam.working[span]
        self._versions = versions


class ShardedAdam:
    """AdamW on this rank's shards of a model, clipped by the norm of the full gradient.

    Args:
        declaration: says which ranks have copies of a parameter, and which of them counts it in the norm.
        options: as for every stage of ZeRO.
        is_sharded: False if this rank's shards are the full buffers, as in DDP.
    """

    def __init__(self, declaration: Declaration, options: ZeroOptions, is_sharded: bool) -> None:
        self.shards: list[LocalShard] = []
        self.num_steps = 0
        self._declaration, self._options, self._is_sharded = declaration, options, is_sharded
        # of the CPU, so that every device rounds alike and any may resume: 4 bytes per weight and step go to a GPU
        self._generator = None if options.rounding_seed is None else torch.Generator()

    def kind(self, parameter: nn.Parameter) -> Kind:
        """Return what a parameter must have in common with its neighbours in a buffer."""
        chosen, name = self._options.hyperparameters, self._declaration.parameters[parameter].name
        hyperparameters = chosen if isinstance(chosen, Hyperparameters) else chosen(name, parameter)
        return Kind(parameter.dtype, hyperparameters, self._declaration.kind(parameter))

    def add_shard(self, bucket: Bucket, working: Tensor, start: int, stop: int) -> None:
        """Make the optimizer state of elements `start` to `stop` of a bucket, whose weights are `working`."""
        first = bucket.parameters[0]
        master = self._options.master and working.element_size() == 2  # fp32 weights are their own masters
        generator = self._generator if working.dtype == torch.bfloat16 else None
        adam = AdamShard(working, self.kind(first).hyperparameters, master, generator)
        self.shards.append(LocalShard(bucket, start, stop, adam, self._declaration.counts(first, self._is_sharded)))

    def add_shards(self, buckets: Iterable[Bucket], flats: Iterable[Tensor]) -> None:
        """Make the optimizer state of this rank's shard of every flat buffer."""
        for bucket, flat in zip(buckets, flats, strict=True):
            shard = local_shard(flat, bucket.group)
            self.add_shard(bucket, shard, *bucket.layout.span(comm.get_rank(bucket.group)))

    def update(
        self,
        gradients: list[Tensor],
        lr_factor: float = 1.0,
        max_norm: float | None = None,
        scaler: LossScaler | None = None,
        norm_type: float = 2.0,
        norm: float | None = None,
    ) -> StepReport:
        """Unscale and clip the gradients, and update the weights of this rank's shards.

        Args:
            gradients: the sum over the ranks, one tensor for each of `shards`.
            lr_factor: multiplies every learning rate.
            max_norm: clip the gradient to this norm; over the `Mesh`, where the model has other parts on other ranks.
            scaler: the loss scaler whose scale the loss was multiplied by.
            norm_type: p of the norm.
            norm: of the full gradient, scaled as the loss was, if this optimizer holds only a part of the model; for
                two optimizers it is `math.hypot(dense.grad_norm(), experts.grad_norm())`.
        """
        if scaler is not None:
            scaler.belong_to(self)
            if scaler.found_inf(gradients):
                scaler.update(True)
                return StepReport(False, None)
        scale = 1.0 / scaler.scale if scaler is not None else 1.0
        if max_norm is not None or norm is not None:
            norm = self.norm(gradients, norm_type) if norm is None else norm
            norm *= scale  # unscaled before it is compared with max_norm
            if not isfinite(norm):  # the same on every rank, so no rank updates
                if scaler is not None:
                    scaler.update(True)
                return StepReport(False, norm)
            scale *= clip_factor(norm, max_norm)
        self.num_steps += 1
        for shard, grad in zip(self.shards, gradients, strict=True):
            self._seed_rounding(shard)
            shard.take_changes()
            shard.adam.step(grad, self.num_steps, lr_factor, scale)
        if scaler is not None:
            scaler.update(False)
        return StepReport(True, norm)

    def _seed_rounding(self, shard: LocalShard) -> None:
        """Draw by name, so that all copies round alike: mirrored stages come in another order, for one."""
        if self._generator is not None:
            first = self._declaration.parameters[shard.bucket.parameters[0]]
            part = None if first.shard is None else first.shard.start
            key = f"{self._options.rounding_seed}/{first.name}/{part}/{shard.start}/{self.num_steps}"
            self._generator.manual_seed(zlib.crc32(key.encode()))

    def norm(self, gradients: list[Tensor], p: float) -> float:
        """Return the p-norm of the full gradient; the same on every rank."""
        self._declaration.check_full()
        held = zip(self.shards, gradients, strict=True)
        counted = [(grad, ("mesh",)) for shard, grad in held if shard.counts]
        return global_norm(counted, {"mesh": self._declaration.mesh.everyone}, p)


class _Taken(NamedTuple):
    """A parameter as the optimizer found it: in which module, under which name, trained or frozen."""

    name: str
    module: nn.Module
    key: str
    parameter: nn.Parameter
    was_trained: bool


class Reducer(Protocol):
    """A reducer that sums the gradients of a stage over its group."""

    is_final: bool
    pipeline: Collection[int]
    lone_copies: Collection[int]

    def finish(self) -> list[Tensor]:
        """Complete the sums and return them, one tensor for each of `ShardedAdam.shards`."""

    def zero(self, num_backwards: int | None = None) -> None:
        """Set the gradients to zero and start a step of so many backwards."""


class ShardedOptimizer:
    """An optimizer composed of a reducer and a `ShardedAdam`: what `Ddp`, `Zero1`, `Zero2` and `Zero3` share.

    Args:
        module: this rank's part of the model.
        group: the `Mesh`, on which every parameter is summed and sharded over its own copies, as the module declares:
            experts over edp, all others over the data axes; or the ranks that hold copies of the module (default: the
            world), which are a mesh with the axis dp alone.
        options: of the stage of ZeRO.
        program: of the pipeline, with a mesh that has one; its placement says which stages are mirrored.

    Attributes:
        adam: updates this rank's shards.
        declaration: says which ranks have copies of each parameter.
        reducer: sums the gradients over the group.
        is_sharded: whether a rank updates one shard of each buffer, or all of it.

    Raises:
        ValueError: as `Declaration`; ranks of a group hold other shards of a layer than this rank, for one.
    """

    is_sharded = True
    reducer: Reducer

    def __init__(
        self,
        module: nn.Module,
        group: Group | Mesh | None,
        options: ZeroOptions | None,
        program: Program | None = None,
    ) -> None:
        self.module, self.options = module, options or ZeroOptions()
        mesh = group if isinstance(group, Mesh) else GroupMesh(group)
        self.declaration = Declaration(module, mesh, self.options.hybrid, program)
        self.declaration.broadcast()
        self.group = self.declaration.dense.group
        self.names = {parameter: name for name, parameter in module.named_parameters()}
        self.adam = ShardedAdam(self.declaration, self.options, self.is_sharded)
        self.sums_tied, self.sums_partial = bool(self.declaration.tied.stage_of), bool(self.declaration.partial)
        self._finished: list[Tensor] | None = None  # the finished gradients, until zero_grad
        self._taken = [
            _Taken(self.names[parameter], part, key, parameter, parameter.requires_grad)
            for part in module.modules()
            for key, parameter in part.named_parameters(recurse=False)
        ]

    @property
    def local_shards(self) -> list[LocalShard]:
        """The shards that this rank updates."""
        return self.adam.shards

    @property
    def num_steps(self) -> int:
        """Number of updates so far."""
        return self.adam.num_steps

    @property
    def padded_numel(self) -> int:
        """Trained elements of the full model, with the padding of each buffer: what the closed forms count."""
        return sum(shard.bucket.layout.padded_numel for shard in self.local_shards)

    def finished_gradients(self) -> list[Tensor]:
        """Complete the sums and return this rank's shards of them, one tensor for each of `local_shards`."""
        if self._finished is None or not self.reducer.is_final:
            self._check_module()
            self._check_copies()
            self.declaration.pipeline = self.reducer.pipeline
            self._finished = self.reducer.finish()
            firsts = [shard.bucket.parameters[0] for shard in self.local_shards]
            self.declaration.complete_sums(list(zip(firsts, self._finished, strict=True)))
        return self._finished

    def grad_norm(self, p: float = 2.0) -> float:
        """Complete the sums and return the norm of the full gradient.

        Raises:
            ValueError: the group or `Mesh` does not have all ranks with parts of the model.
        """
        return self.adam.norm(self.finished_gradients(), p)

    def _check_module(self) -> None:
        """Refuse parameters that were frozen, unfrozen or replaced since the optimizer took the module."""
        for name, part, key, parameter, was_trained in self._taken:
            is_replaced = getattr(part, key, None) is not parameter
            if is_replaced:
                raise ValueError(
                    f"{name} was replaced since {type(self).__name__} took the module, and would not be trained; load "
                    "with load_state_dict(assign=False), change weights in place, or make the optimizer anew"
                )
            if parameter.requires_grad != was_trained:
                words = ("frozen", "trained")
                raise ValueError(
                    f"{name} was {words[was_trained]} when {type(self).__name__} took the module and is "
                    f"{words[parameter.requires_grad]} now; make the optimizer anew after requires_grad_()"
                )

        for bucket in (shard.bucket for shard in self.local_shards):
            for parameter, address in zip(bucket.parameters, bucket.addresses, strict=False):  # ZeRO-3 has none
                if parameter.data_ptr() != address:
                    raise ValueError(
                        f"{self.names[parameter]} has got other memory since {type(self).__name__} took the module, "
                        "and would not be trained; call to(), half() and the like before, and do not assign .data"
                    )

    def _check_copies(self) -> None:
        if self.reducer.lone_copies:
            raise ValueError(
                f"stages {sorted(self.reducer.lone_copies)} have copies on other ranks of the pipeline, and nobody has "
                "added their gradients; leave out sum_mirrors=False, or call runtime.sum_mirrors() after its step"
            )

    def zero_grad(self, num_backwards: int | None = None) -> None:
        """Set the gradients to zero; due before the first backward after a step.

        Args:
            num_backwards: of the coming step, if it differs from `ZeroOptions.num_backwards`: a last, partial one.
        """
        self._finished = None
        self.reducer.zero(self.options.num_backwards if num_backwards is None else num_backwards)

    def all_gather_weights(self) -> None:
        """Give every rank the updated weights; does nothing in `Ddp` (all ranks updated them) and `Zero3`."""

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Have the full weights inside of the `with` block, to read or to change."""
        yield


def full_weights(optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    """Return copies of the full weights by name, to compare with; every rank of the group must call this."""
    with optimizer.gathered():
        return {name: parameter.detach().clone() for name, parameter in optimizer.module.named_parameters()}


def full_gradients(optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    """Return copies of the full summed gradients of all trained parameters; every rank of the group must call this.

    It completes the sums, as a step does: call it after the last backward of a step.
    """
    found: dict[str, Tensor] = {}
    for shard, grad in zip(optimizer.local_shards, optimizer.finished_gradients(), strict=True):
        full = grad.clone()
        if optimizer.is_sharded:
            full = grad.new_empty(shard.bucket.layout.padded_numel)
            comm.all_gather_single(full, grad.contiguous(), shard.bucket.group)
        names = [optimizer.names[parameter] for parameter in shard.bucket.parameters]
        found |= dict(zip(names, shard.bucket.views(full), strict=True))
    return found
