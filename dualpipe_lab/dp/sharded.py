"""`ShardUpdater` and `ShardedOptimizer`: what ZeRO-1, ZeRO-2, ZeRO-3 and plain data parallelism have in common.

Chapter: book/dp/zero-1.  In: a module, a group of N ranks.  Out: an optimizer of torch, whose `step` is:
  reduce-scatter the gradients -> mean -> unscale -> norm of the full gradient -> clip -> AdamW on the local shard ->
  all-gather
Each stage is composed of a reducer, which sums the gradients over the ranks, and a `ShardUpdater`.
Parameters that share type, param group and axes lie in one flat buffer, so that a shard may begin or end inside of a
parameter without mixing up learning rates.  Torch's optimizers that update each element by itself train shards, too.
Elsewhere: `full_weights` and `full_gradients` are FSDP2 `DTensor.full_tensor`, DeepSpeed `safe_get_full_grad`.
"""

import zlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import isfinite
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group, members
from dualpipe_lab.dp.adam import AdamW, OptimizerShard, check_elementwise, check_eps
from dualpipe_lab.dp.buckets import BUCKET_BYTES, Bucket, local_shard
from dualpipe_lab.dp.grad_norm import clip_factor, global_norm
from dualpipe_lab.dp.mixed_precision import LossScaler
from dualpipe_lab.dp.param_specs import ModelSpec
from dualpipe_lab.grad_ready import Absent
from dualpipe_lab.launch.mesh import GroupMesh, Mesh
from dualpipe_lab.pp.program import Program


@dataclass(frozen=True)
class UpdateResult:
    """The result of a step.

    Attributes:
        stepped: False if the norm was not finite or, with a scaler, a gradient on any rank: then no rank has updated
            its weights.  A step with neither `max_norm` nor a scaler does not check.
        norm: of the full gradient, before clipping; None if it was not computed.
    """

    stepped: bool
    norm: float | None


class BucketKey(NamedTuple):
    """What parameters must have in common to share a buffer; `group` is the number of their param group."""

    dtype: torch.dtype
    group: int
    declared: frozenset[str]


@dataclass
class LocalShard:
    """Elements `start` to `stop` of a bucket, with their optimizer state: what this rank updates.

    `group` is the number of their param group.  Of all ranks that update the same elements, `counts` is true on the one
    whose gradient is in the norm.
    """

    bucket: Bucket
    start: int
    stop: int
    optimizer: OptimizerShard
    group: int
    counts: bool


class ShardUpdater:
    """AdamW, or another elementwise optimizer, on this rank's shards of a model, clipped by the norm of the gradient.

    Args:
        spec: says which ranks have copies of a parameter, and which of them counts it in the norm.
        groups: the param groups, whose values are read at every step.
        optimizer: makes the optimizer of a shard, from a list with one parameter.
        is_sharded: False if this rank's shards are the full buffers, as in DDP.
        master, rounding_seed: as for every stage of ZeRO.
    """

    def __init__(
        self,
        spec: ModelSpec,
        groups: list[dict[str, Any]],
        optimizer: Callable[..., Optimizer],
        is_sharded: bool,
        master: bool,
        rounding_seed: int | None,
    ) -> None:
        self.shards: list[LocalShard] = []
        self.num_steps = 0
        self._spec, self._groups, self._optimizer = spec, groups, optimizer
        self._is_sharded, self._master, self._rounding_seed = is_sharded, master, rounding_seed
        self._group_of = {parameter: at for at, group in enumerate(groups) for parameter in group["params"]}
        # of the CPU, so that every device rounds alike and any may resume: 4 bytes per weight and step go to a GPU
        self._generator = None if rounding_seed is None else torch.Generator()

    def kind(self, parameter: nn.Parameter) -> BucketKey:
        """Return what a parameter must have in common with its neighbours in a buffer."""
        return BucketKey(parameter.dtype, self._group_of.get(parameter, -1), self._spec.kind(parameter))

    def add_shard(self, bucket: Bucket, working: Tensor, start: int, stop: int) -> None:
        """Make the optimizer state of elements `start` to `stop` of a bucket, whose weights are `working`."""
        first = bucket.parameters[0]
        group, counts = self._group_of[first], self._spec.counts(first, self._is_sharded)
        master = self._master and working.element_size() == 2  # fp32 weights are their own masters
        generator = self._generator if working.dtype == torch.bfloat16 else None
        values, make = {**self._groups[group]}, self._optimizer  # a shard that held this object would outlive it
        shard = OptimizerShard(
            working,
            optimizer=lambda parameters: make([{**values, "params": parameters}]),
            master=master,
            generator=generator,
        )
        self.shards.append(LocalShard(bucket, start, stop, shard, group, counts))

    def add_shards(self, buckets: Iterable[Bucket], flats: Iterable[Tensor]) -> None:
        """Make the optimizer state of this rank's shard of every flat buffer."""
        for bucket, flat in zip(buckets, flats, strict=True):
            shard = local_shard(flat, bucket.group)
            self.add_shard(bucket, shard, *bucket.layout.span(comm.get_rank(bucket.group)))

    def update(
        self,
        gradients: list[Tensor],
        max_norm: float | None = None,
        scaler: LossScaler | None = None,
        norm_type: float = 2.0,
        norm: float | None = None,
    ) -> UpdateResult:
        """Unscale and clip the gradients, and update the weights of this rank's shards.

        `gradients` are the sums over the ranks, one tensor for each of `shards`; all else is as in
        `ShardedOptimizer.step`.
        """
        if scaler is not None:
            scaler.belong_to(self)
            if scaler.found_inf(gradients):
                scaler.update(True)
                return UpdateResult(False, None)
        scale = 1.0 / scaler.scale if scaler is not None else 1.0
        if max_norm is not None or norm is not None:
            norm = self.norm(gradients, norm_type) if norm is None else norm
            norm *= scale  # unscaled before it is compared with max_norm
            if not isfinite(norm):  # the same on every rank, so no rank updates
                if scaler is not None:
                    scaler.update(True)
                return UpdateResult(False, norm)
            scale *= clip_factor(norm, max_norm)
        self.num_steps += 1
        for shard, grad in zip(self.shards, gradients, strict=True):
            if self._generator is not None:
                self._seed_rounding(self._generator, shard)
            shard.optimizer.take_values(self._groups[shard.group])
            shard.optimizer.step(grad, scale)
        if scaler is not None:
            scaler.update(False)
        return UpdateResult(True, norm)

    def _seed_rounding(self, generator: torch.Generator, shard: LocalShard) -> None:
        """Draw by name, so that all copies round alike: mirrored stages come in another order, for one."""
        first = self._spec.parameters[shard.bucket.parameters[0]]
        part = None if first.shard is None else first.shard.start
        key = f"{self._rounding_seed}/{first.name}/{part}/{shard.start}/{self.num_steps}"
        generator.manual_seed(zlib.crc32(key.encode()))

    def norm(self, gradients: list[Tensor], p: float) -> float:
        """Return the p-norm of the full gradient; the same on every rank."""
        self._spec.check_full()
        held = zip(self.shards, gradients, strict=True)
        counted = [(grad, ("mesh",)) for shard, grad in held if shard.counts]
        return global_norm(counted, {"mesh": self._spec.mesh.everyone}, p)


class Reducer(Protocol):
    """A reducer that sums the gradients of a stage over its group."""

    divisor: int
    is_final: bool
    pipeline: Collection[int]
    lone_copies: Collection[int]
    sums_tied: bool
    sums_partial: bool

    def finish(self) -> list[Tensor]:
        """Complete the sums and return them, one tensor for each of `ShardUpdater.shards`."""

    def zero(self, num_backwards: int | None = None) -> None:
        """Set the gradients to zero and start a step of so many backwards."""


class ShardedOptimizer(Optimizer):  # type: ignore[misc]
    """What `DDP`, `Zero1`, `Zero2` and `Zero3` share: an optimizer composed of a reducer and a `ShardUpdater`.

    Attributes:
        param_groups: as torch has them: the parameters of the module, and the values that every step reads; whoever
            changes these, such as a scheduler, does so alike on every rank.
        updater: updates this rank's shards.
        spec: says which ranks have copies of each parameter.
        reducer: sums the gradients over the group.
        is_sharded: whether a rank updates one shard of each buffer, or all of it.
    """

    is_sharded = True
    reducer: Reducer

    def __init__(
        self,
        module: nn.Module,
        mesh: Group | Mesh | None = None,
        *,
        params: Iterable[Any] | None = None,
        optimizer: Callable[..., Optimizer] | None = None,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        max_norm: float | None = None,
        master: bool = False,
        rounding_seed: int | None = None,
        grad_dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        num_backwards: int = 1,
        hybrid: bool = False,
        program: Program | None = None,
        reduce: str = "mean",
        **hyperparameters: Any,
    ) -> None:
        """Take the trained parameters of a module, which have equal values on all ranks from here on.

        Buffers are equal at first alone: what a forward moves, such as the means of BatchNorm, is each rank's own;
        torch's `DistributedDataParallel` broadcasts rank 0's before every forward.

        Args:
            module: this rank's part of the model.
            mesh: the `Mesh`, on which every parameter is summed and sharded over its own copies, as the module
                declares: experts over edp, all others over the data axes; or the group of ranks that hold copies of the
                module; None (default) for the world.
            params: param groups as torch has them, such as `[{"params": [...], "weight_decay": 0.0}, {"params": ...}]`,
                with every trained parameter in exactly one; None (default) for one group.
            optimizer: a class of torch.optim, or of your own, that updates every element by itself, whatever its
                neighbours are; None (default) for `AdamW`.
            lr: the learning rate; None (default) of these four for the optimizer's own default, AdamW: 1e-3.
            betas: decay of the two running means (AdamW: 0.9, 0.999).
            eps: is added to the denominator (AdamW: 1e-8).
            weight_decay: the part of a weight that a step subtracts, times `lr` (AdamW: 0.01); a weight that no rank
                has used has gradient 0, and decays too.
            max_norm: clip the gradient of the full model to this norm; None (default) for no clipping.
            master: keep fp32 weights for 16-bit parameters (default: False).
            rounding_seed: instead, round bf16 weights at random, from this seed (default: None).
            grad_dtype: the type in which gradients accumulate and travel; None (default) for that of the parameters.
            bucket_bytes: the largest size of a bucket (default: 25 MiB); `Zero3` does not use it.
            num_backwards: backward passes of a step, one for each microbatch (default: 1); `Zero3` does not use it.  A
                call of `PipelineRuntime.step` has all its microbatches, whatever this says; for an update after several
                calls, give the microbatches of all together.
            hybrid: shard within the nodes of a `Mesh` and replicate across them (default: False).
            program: of the pipeline, with a mesh that has one; its placement says which stages are mirrored
                (default: None).
            reduce: "mean" (default) divides the summed gradients by the number of ranks with other data, experts' too,
                as torch's `DistributedDataParallel` does: each rank's loss is the mean over its own batch.  "sum" does
                not, for losses that are summands of the whole batch's.
            hyperparameters: further arguments of the optimizer's class, such as `momentum=0.9` of torch.optim.SGD.

        Raises:
            ValueError: no parameter needs a gradient, one is complex, one is in no group or in several, a table has
                `max_norm`, a number is out of its range, or as `ModelSpec`; ranks of a group hold other shards of a
                layer than this rank, for one.
            TypeError: `optimizer` is no class or function, or has no such argument.
        """
        if reduce not in ("mean", "sum"):
            raise ValueError(
                f'gradients of data ranks have their "mean" or their "sum", got reduce={reduce!r}; use one'
            )
        self.module, self.names = module, {parameter: name for name, parameter in module.named_parameters()}
        _check_arguments(module, optimizer, grad_dtype)
        clip_factor(1.0, max_norm)  # checks it
        self.max_norm, self.num_backwards = max_norm, num_backwards
        self.bucket_bytes, self.grad_dtype = bucket_bytes, grad_dtype
        given: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        numbers = {name: value for name, value in given.items() if value is not None}
        kind: Callable[..., Optimizer] = optimizer or AdamW
        make = partial(kind, **numbers, **hyperparameters)
        groups = _param_groups(self.names, params)
        if kind is not AdamW:
            check_elementwise(make)
        trials = [make([{**group, "params": [nn.Parameter(torch.zeros(1))]}]) for group in groups]  # checks the numbers
        for group, trial in zip(groups, trials, strict=True):
            for weight in group["params"]:
                updated = torch.float32 if master and weight.element_size() == 2 else weight.dtype
                check_eps(updated, trial.param_groups[0].get("eps"))
        super().__init__(groups, trials[0].defaults)
        if not isinstance(mesh, Mesh | Group | None):
            raise TypeError(
                f"mesh is a Mesh, a group of ranks or None, got {type(mesh).__name__}; all else goes by name, such as "
                "lr=, params= and the units= of ZeRO-3"
            )
        over = mesh if isinstance(mesh, Mesh) else GroupMesh(mesh)
        self.spec = ModelSpec(module, over, hybrid, program)
        self.spec.broadcast()
        self.group = self.spec.dense.group
        self.updater = ShardUpdater(self.spec, self.param_groups, make, self.is_sharded, master, rounding_seed)
        self._compared = False  # replicated gradients over tp, in the first step
        self._finished: list[Tensor] | None = None  # the finished gradients, until zero_grad
        self.reducer = self._take(module)
        weights = (p for shard in self.local_shards for p in shard.bucket.parameters if not isinstance(p, Absent))
        self._in_buffers = {parameter: parameter.data_ptr() for parameter in weights}  # ZeRO-3's are absent now
        named = module.named_parameters(remove_duplicate=False)
        self._taken = {name: (parameter, parameter.requires_grad) for name, parameter in named}
        self._checked: tuple[list[int], list[bool], list[int]] | None = None  # as check_module found it last
        self.check_module()
        self.reducer.divisor = self.spec.num_data_ranks() if reduce == "mean" else 1
        self.reducer.sums_tied = any(found.tied for found in self.spec.parameters.values())
        self.reducer.sums_partial = any(found.partial for found in self.spec.parameters.values())

    @abstractmethod
    def _take(self, module: nn.Module) -> Reducer:
        """Shard the module, add the shards to `updater`, and return what sums the gradients."""

    def step(
        self,
        closure: None = None,
        *,
        max_norm: float | None = None,
        scaler: LossScaler | None = None,
        norm_type: float = 2.0,
        norm: float | None = None,
    ) -> UpdateResult:
        """Take one step: complete the sums, clip, update this rank's shards, and gather what the model needs.

        Args:
            closure: None; torch's closures compute gradients anew, which the hooks of the backward would miss.
            max_norm: clip the gradient to this norm, over the `Mesh`, where the model has other parts on other ranks
                (default: that of the constructor; `math.inf` clips nothing).
            scaler: the loss scaler whose scale the loss was multiplied by.
            norm_type: p of the norm (default: 2).
            norm: of the full gradient, scaled as the loss was, if this optimizer holds only a part of the model; for
                two optimizers it is `math.hypot(dense.grad_norm(), experts.grad_norm())`.
        """
        if closure is not None:
            raise TypeError(
                f"{type(self).__name__}.step takes no closure, and its arguments by name; call zero_grad(), the "
                "forward and backward(), then step(max_norm=...)"
            )
        # 1. reduce-scatter (DDP: all-reduce): launched by hooks during the backwards, completed here
        gradients = self.finished_gradients()
        # 2. norm and clip, 3. AdamW on the local shard
        report = self.updater.update(
            gradients, self.max_norm if max_norm is None else max_norm, scaler, norm_type, norm
        )
        # 4. all-gather (ZeRO-3: of what is gathered now; the next forward gathers the rest)
        if report.stepped:
            self.all_gather_weights()
        return report

    @property
    def local_shards(self) -> list[LocalShard]:
        """The shards that this rank updates."""
        return self.updater.shards

    @property
    def num_steps(self) -> int:
        """Number of updates so far."""
        return self.updater.num_steps

    @property
    def padded_numel(self) -> int:
        """Trained elements of the full model, with the padding of each buffer: what the closed forms count."""
        return sum(shard.bucket.layout.padded_numel for shard in self.local_shards)

    def finished_gradients(self) -> list[Tensor]:
        """Complete the gradients and return this rank's shards of them, one tensor for each of `local_shards`."""
        if self._finished is None or not self.reducer.is_final:
            self.check_module()
            if self.reducer.lone_copies:
                raise ValueError(
                    f"stages {sorted(self.reducer.lone_copies)} have copies on other ranks of the pipeline, and nobody "
                    "has added their gradients; leave out sum_copies=False, or call runtime.sum_copies() after its step"
                )
            self.spec.pipeline = self.reducer.pipeline
            if self.reducer.divisor > 1 and len(copies := {*self.reducer.pipeline} & {*members(self.group)}) > 1:
                raise ValueError(
                    f"ranks {sorted(copies)} are of one pipeline and hold copies of a stage, whose gradients are added "
                    'as each copy has seen other microbatches of the batch; give the optimizer reduce="sum"'
                )
            self._finished = self.reducer.finish()
            firsts = [shard.bucket.parameters[0] for shard in self.updater.shards]
            self.spec.complete_sums(list(zip(firsts, self._finished, strict=True)))
            if self.spec.replicated and not self._compared:
                self._compared = True
                parts = [
                    (shard.bucket.parameters[tensor], grad[offset + start : offset + stop])
                    for shard, grad in zip(self.updater.shards, self._finished, strict=True)
                    for tensor, start, stop in shard.bucket.layout.tensors_between(shard.start, shard.stop)
                    for offset in [shard.bucket.layout.offsets[tensor] - shard.start]
                ]
                self.spec.check_replicated(parts, self.is_sharded)
            if self.reducer.divisor > 1:
                for grad in self._finished:
                    grad /= self.reducer.divisor
        return self._finished

    def grad_norm(self, p: float = 2.0) -> float:
        """Complete the sums and return the norm of the full gradient.

        Raises:
            ValueError: the group or `Mesh` does not have all ranks with parts of the model.
        """
        return self.updater.norm(self.finished_gradients(), p)

    def check_module(self) -> None:
        """Refuse parameters that were frozen, unfrozen or replaced since the optimizer took the module."""
        parameters = [*map(itemgetter(1), self.module.named_parameters(remove_duplicate=False))]
        trained, places = map(attrgetter("requires_grad"), parameters), map(Tensor.data_ptr, self._in_buffers)
        found = [*map(id, parameters)], [*trained], [*places]
        if found != self._checked:
            self._check_changes()
            self._checked = found

    def _check_changes(self) -> None:
        kind, now = type(self).__name__, dict(self.module.named_parameters(remove_duplicate=False))
        for name, (parameter, was_trained) in self._taken.items():
            if name not in now or now[name] is not parameter:
                raise ValueError(
                    f"{name} was replaced since {kind} took the module, and would not be trained; load with "
                    "load_state_dict(assign=False), change weights in place, or make the optimizer anew"
                )
            if parameter.requires_grad != was_trained:
                words = ("frozen", "trained")
                raise ValueError(
                    f"{name} was {words[was_trained]} when {kind} took the module and is "
                    f"{words[parameter.requires_grad]} now; make the optimizer anew after requires_grad_()"
                )
        for name, parameter in now.items():
            if parameter.requires_grad and parameter not in self.names:
                raise ValueError(
                    f"{name} was added since {kind} took the module, and would not be trained; make the optimizer anew"
                )
        for parameter, place in self._in_buffers.items():
            if parameter.data_ptr() != place:
                raise ValueError(
                    f"{self.names[parameter]} has got other memory since {kind} took the module, and would not be "
                    "trained; call to(), half() and the like before, and do not assign .data"
                )

    def zero_grad(self, set_to_none: bool = True, *, num_backwards: int | None = None) -> None:
        """Set the gradients to zero; due before the first backward after a step.

        Args:
            set_to_none: as in torch, and without effect: gradients lie in buffers.
            num_backwards: of the coming step, if it differs from that of the constructor: a last, partial one.
        """
        self._finished = None
        self.reducer.zero(self.num_backwards if num_backwards is None else num_backwards)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group after the construction, which has laid out the buffers."""
        if hasattr(self, "updater"):
            raise ValueError("the buffers of the parameters are laid out by group; name all groups with params=")
        super().add_param_group(param_group)

    def state_dict(self, *_: Any) -> dict[str, Any]:
        """Refuse: each rank has a shard of the state."""
        raise ValueError(
            "each rank has a shard of the optimizer's state; save and load it on any number of ranks with "
            "dp.checkpoint.save(folder, step, optimizer) and dp.checkpoint.load(path, optimizer)"
        )

    load_state_dict = state_dict

    def __reduce__(self) -> Any:
        """Refuse copies and pickles: buffers, hooks and groups of ranks are this module's and this process's."""
        raise ValueError(
            f"a {type(self).__name__} cannot be copied or pickled, with its hooks on a module and groups of ranks; "
            "save it with dp.checkpoint.save, or hand on dp.full_weights(optimizer)"
        )

    def all_gather_weights(self) -> None:
        """Give every rank the updated weights; does nothing in `DDP`, where all ranks updated them."""

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Have the full weights inside of the `with` block, to read or to change."""
        yield


def _param_groups(names: dict[nn.Parameter, str], params: Iterable[Any] | None) -> list[dict[str, Any]]:
    """Return torch's param groups of a module's parameters, each with a list of them."""
    trained = [parameter for parameter in names if parameter.requires_grad]
    if not trained:
        raise ValueError("no parameter needs a gradient; a frozen module needs no optimizer")
    for parameter in trained:
        if parameter.is_complex():  # the norm, moments and rounding would lose the imaginary part
            raise ValueError(
                f"{names[parameter]} is {parameter.dtype}, and gradients are taken for real numbers; train "
                "torch.view_as_real of its values, and call torch.view_as_complex in the forward"
            )
    listed = trained if params is None else list(params)
    groups = listed if all(isinstance(group, dict) for group in listed) else [{"params": listed}]
    groups = [{**group, "params": _listed(group["params"])} for group in groups]
    counts = Counter(parameter for group in groups for parameter in group["params"])
    for parameter in trained:
        if counts[parameter] != 1:
            raise ValueError(
                f"every trained parameter is in exactly one group of params=, and {names[parameter]} is in "
                f"{counts[parameter]}; name it once, or freeze it with requires_grad_(False)"
            )
    foreign = [tuple(parameter.shape) for parameter in counts if parameter not in names]
    if foreign:
        raise ValueError(f"params= has a parameter of shape {foreign[0]} that is not the module's; leave it out")
    return groups


def _check_arguments(module: nn.Module, optimizer: object, grad_dtype: torch.dtype | None) -> None:
    if optimizer is not None and not callable(optimizer):
        raise TypeError(f"optimizer= takes a class such as torch.optim.SGD, got {optimizer!r}")
    if grad_dtype is not None and not grad_dtype.is_floating_point:
        raise ValueError(f"gradients are floating-point numbers, got grad_dtype={grad_dtype}; use torch.float32")
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise ValueError(
                f"{name or 'the module'} has max_norm={part.max_norm}, by which a forward changes rows of the table in "
                "place, on each rank those of its own batch; leave it out, and scale what the table returns"
            )


def _listed(params: Any) -> list[nn.Parameter]:
    """Return the parameters of a group: one, several, or pairs of name and parameter."""
    found = [params] if isinstance(params, Tensor) else list(params)
    return [each[1] if isinstance(each, tuple) else each for each in found]


def full_weights(optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    """Return copies of the full weights by name, to compare with; every rank of the group must call this."""
    with optimizer.gathered():
        return {name: parameter.detach().clone() for name, parameter in optimizer.module.named_parameters()}


def full_gradients(optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    """Return copies of the full gradients of all trained parameters, as a step uses them, before clipping.

    It completes the sums, as a step does: every rank of the group calls it after the last backward of a step.
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
