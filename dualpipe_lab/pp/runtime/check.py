"""Checks before a run: `check` runs all stages in one process, without ranks.

Chapter: book/pp/gpipe.  In: a program, all stages, a batch.  Out: nothing, or one error that says what to change.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dualpipe_lab._private import accumulate_grad_node, version_of
from dualpipe_lab.pp.program import Program, W
from dualpipe_lab.pp.runtime.batch import Extra, make_batch, mean_loss
from dualpipe_lab.pp.runtime.shape_inference import Boundary, GivenShapes, spec_of
from dualpipe_lab.pp.runtime.stage import (
    Stage,
    Tensors,
    WithLoss,
    arguments_of,
    as_tensors,
    call_with,
    has_gradient,
    scaled,
    tensors_in,
)
from dualpipe_lab.pp.validation.validator import validate

_ACCUMULATE_GRAD = accumulate_grad_node()
Stages: TypeAlias = Mapping[int, nn.Module | Stage] | Sequence[nn.Module | Stage] | nn.ModuleDict | nn.ModuleList


def by_number(name: str, placed: Sequence[int], stages: Stages) -> dict[int, Any]:
    """Return the given stages by number; a list has them in the order of the numbers that a program places here."""
    got = type(stages).__name__
    if isinstance(stages, Mapping | nn.ModuleDict):
        named = dict(stages.items())
        if all(str(key).isdigit() for key in named):
            return {int(key): stage for key, stage in named.items()}
        got = f"the names {list(named)}"
    elif isinstance(stages, Sequence | nn.ModuleList):
        if len(stages) == len(placed):
            return dict(zip(placed, stages, strict=True))
        got = f"{len(stages)} modules without numbers"
    raise ValueError(
        f"{name} places stages {list(placed)} here, got {got}; give each module under its number, as in "
        f"{{{placed[0]}: module}}"
    )


def check_world(program: Program, size: int) -> None:
    """Raise ValueError unless a program is written for `size` ranks."""
    if program.num_ranks != size:
        raise ValueError(
            f"{program.name} is written for {program.num_ranks} ranks, the group has {size}; build it for {size}"
        )


def check_stages(program: Program, rank: int, modules: Mapping[int, nn.Module], sums_copies: bool) -> None:
    """Raise ValueError for modules of other stages than the rank's, and in wrappers of torch that lose gradients."""
    placed = {*program.stages_of(rank)}
    if set(modules) != placed:
        raise ValueError(
            f"{program.name} places stages {sorted(placed)} on rank {rank}, got modules for {sorted(modules)}"
        )
    _check_unwrapped(modules)
    if sums_copies:
        _check_apart(modules)
    _check_fully_sharded(program, rank, modules, sums_copies)


def _check_fully_sharded(program: Program, rank: int, modules: Mapping[int, nn.Module], sums_copies: bool) -> None:
    # FSDP2 reduces the gradients of a module when its backward reaches the module's inputs, which is in I.  The
    # gradients of W are reduced with the next I; those of the last W are never reduced.
    split = {action.stage for action in program.actions(rank) if action.kind == W}
    for stage, module in modules.items():
        kinds = {base.__name__ for layer in module.modules() for base in type(layer).__mro__}
        if "FSDPModule" in kinds and (stage in split or sums_copies):
            why = "reduces its gradients in I, before W has made them" if stage in split else "shards what mirrors add"
            raise ValueError(
                f"stage {stage} of {program.name} is sharded by torch's fully_shard, which {why}; use Zero3 of "
                "dualpipe_lab.dp, or a schedule without W and without mirrors, such as 1f1b or interleaved"
            )


def _check_unwrapped(modules: Mapping[int, nn.Module]) -> None:
    # DDP's reducer is made ready by a forward for the backward that follows.  A pipeline runs several forwards first,
    # and W and mirrors add to gradients that have been averaged: ranks would differ, without any error.
    for stage, module in modules.items():
        if any("DistributedDataParallel" in (base.__name__ for base in type(m).__mro__) for m in module.modules()):
            raise ValueError(
                f"stage {stage} is wrapped in torch's DistributedDataParallel, which averages the gradients of one "
                "forward, and a pipeline runs several before their backwards; give the runtime the module itself, and "
                "sum its gradients with DDP of dualpipe_lab.dp"
            )


def _check_apart(modules: Mapping[int, nn.Module]) -> None:
    owners: dict[nn.Parameter, int] = {}
    for stage, module in modules.items():
        for parameter in module.parameters():
            if owners.setdefault(parameter, stage) != stage and parameter.requires_grad:
                raise ValueError(
                    f"stages {owners[parameter]} and {stage} of this rank share a parameter, which would count twice: "
                    "the gradients of copies are added by stage; give each stage a parameter of its own, and call "
                    "sum_tied after the step"
                )


def shared_parameter(modules: Mapping[int, nn.Module | Stage]) -> str:
    """Which parameter two stages have in common, in words; an empty string if none."""
    owners: dict[int, tuple[int, str]] = {}
    for stage, module in modules.items():
        for name, parameter in module.named_parameters() if isinstance(module, nn.Module) else ():
            first, there = owners.setdefault(id(parameter), (stage, name))
            if first != stage:
                return f"{there} of stage {first} and {name} of stage {stage} are one parameter"
    return ""


def check_output(stage: int, microbatch: int, output: Tensors) -> None:
    """Raise ValueError if no gradient can come back for the output of a stage."""
    if not any(map(has_gradient, output)):
        types = ", ".join(str(tensor.dtype) for tensor in output) or "nothing"
        raise ValueError(
            f"stage {stage} returned {types} for microbatch {microbatch}, and no gradient comes back for integers; "
            "return a floating point tensor (integers may go beside it, in a tuple)"
        )
    if sparse := [str(tensor.layout) for tensor in output if tensor.layout is not torch.strided]:
        raise ValueError(
            f"stage {stage} returned a tensor of layout {sparse[0]} for microbatch {microbatch}, and dense ones travel "
            "between ranks; return to_dense()"
        )


def check_loss(stage: Stage, outputs: Iterable[Any], loss: Tensor, is_summed: bool) -> None:
    """Raise ValueError for a loss without a graph, or with weights whose gradient is not summed like the stage's."""
    tensors = [y for given in outputs for y in tensors_in(given)]
    if torch.is_grad_enabled() and isinstance(loss, Tensor) and not loss.requires_grad:
        where = "the loss function" if any(y.requires_grad for y in tensors) else f"stage {stage.index}"
        raise ValueError(
            f"the loss does not depend on any weight, as {where} returns a tensor without a graph, so that nothing "
            "would train; remove detach(), item() or torch.no_grad() there"
        )
    known: set[Any] = {y.grad_fn for y in tensors}
    stack = [loss.grad_fn] if isinstance(loss, Tensor) and loss.grad_fn not in {*known, None} else []
    found: list[Tensor] = []
    while stack:
        node = stack.pop()
        known.add(node)
        if isinstance(node, _ACCUMULATE_GRAD):
            found.append(node.variable)
        stack += [child for child, _ in node.next_functions if child is not None and child not in known]
    leaves = set(found) - set(tensors)
    if not stage.takes_loss_weights and leaves:
        why = "its stage runs in pieces, which take none; let the last layer compute the loss"
    elif is_summed and leaves - set(stage.module.parameters()):
        why = (
            "nobody sums its gradient over the ranks that have it; make the loss function a part of the last stage "
            "(stage.loss = loss_fn), before the optimizer is made"
        )
    else:
        return
    shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
    raise ValueError(f"the loss function trains a weight of its own (shape {shapes}), and {why}")


class Buffers:
    """The buffers of a stage with copies on other ranks; none may change in a forward, of which each copy sees half."""

    def __init__(self, stage: int, module: nn.Module) -> None:
        self._stage = stage
        self._named = [
            (f"{prefix}.{name}".lstrip("."), layer, name)
            for prefix, layer in module.named_modules()
            for name, _ in layer.named_buffers(recurse=False)
        ]
        self._seen = self._now()

    def begin(self) -> None:
        """Begin a forward."""
        self._seen = self._now()

    def check(self) -> None:
        """Raise ValueError if the forward has changed a buffer."""
        for (label, layer, name), (old, version), (new, now) in zip(self._named, self._seen, self._now(), strict=True):
            if new is old:
                is_statistic = name == "running_mean" and getattr(layer, "track_running_stats", False)
                if now == version and not (is_statistic and layer.training):  # kernels change these uncounted
                    continue
            elif old is None or new is None or new.shape != old.shape or torch.equal(new, old):
                continue  # made anew, such as a table of angles
            raise ValueError(
                f"a forward of stage {self._stage} changes its buffer {label}, and the copies of the stage see other "
                "microbatches: the buffers of the copies would differ; use a schedule without copies, such as "
                "dualpipev, or a module without such statistics (LayerNorm, or BatchNorm with "
                "track_running_stats=False)"
            )

    def _now(self) -> list[tuple[Tensor | None, int]]:
        buffers = [getattr(layer, name, None) for _, layer, name in self._named]
        return [(buffer, 0 if buffer is None else version_of(buffer)) for buffer in buffers]


def check(
    program: Program,
    stages: Stages,
    loss_fn: Callable[..., Tensor],
    inputs: Any,
    targets: Any,
    num_ranks: int | None = None,
    boundary: Boundary | None = None,
    extra: Extra | None = None,
    weights: Sequence[float] | None = None,
) -> None:
    """Run every microbatch through copies of all stages, without ranks and without gradients.

    Args:
        program: the program of the run.
        stages: the modules of all stages, not of one rank.
        loss_fn: as for `PipelineRuntime`.
        inputs: as for its `step`.
        targets: as for its `step`.
        num_ranks: the number of ranks of the run.
        boundary: as for `PipelineRuntime`.
        extra: as for its `step`.
        weights: as for its `step`.

    Raises:
        ValueError, TypeError: the errors that a run would raise; InvalidProgram as `validate`.  A parameter that two
            stages have in common is warned of.
    """
    validate(program)
    check_world(program, program.num_ranks if num_ranks is None else num_ranks)
    given = by_number(program.name, range(program.num_stages), stages)
    if set(given) != set(range(program.num_stages)):
        raise ValueError(
            f"{program.name} has stages 0 to {program.num_stages - 1}, got modules for {sorted(given)}; give all"
        )
    if shared := shared_parameter(given):
        warnings.warn(
            f"{shared}, and each rank trains its own copy: sum their gradients by runtime.sum_tied after each step, "
            "or give each stage a parameter of its own",
            stacklevel=2,
        )
    batch = make_batch(program.name, program.num_microbatches, inputs, targets, weights, extra)
    for microbatch in range(program.num_microbatches):
        batch.input(microbatch)
    modules = {stage: deepcopy(module) for stage, module in given.items()}  # a forward may change buffers
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for microbatch in range(program.num_microbatches):
            tensors = batch.input(microbatch)
            for stage in range(program.num_stages):
                output = call_with(modules[stage], tensors, batch.extra_of(stage, microbatch))
                if isinstance(output, WithLoss):
                    scaled(output.loss, 1)
                tensors = as_tensors(f"stage {stage}", output)
                if stage < program.num_stages - 1:
                    check_output(stage, microbatch, tensors)
                    if boundary is not None:
                        GivenShapes(boundary).check_spec(stage, microbatch, spec_of(tensors))
            scaled(mean_loss(loss_fn, batch, microbatch, arguments_of(tensors), True), 1)
