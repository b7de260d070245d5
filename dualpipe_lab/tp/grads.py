"""Gradients of a tensor-parallel model after the backward: summing partial ones, and their norm.

Chapters: book/tp/rmsnorm, book/tp/block.  In: modules that name their `shards` and their `partial` parameters.
Out: gradients that are equal on all replicas; each element of the full model counted once in the norm.
  parameter                 on the ranks of tp    gradient there         in the norm
  sharded: linear layers    other shards          complete               a sum over tp
  replicated: norms         the same              complete or partial    once; summed over tp, it would count t times
  replicas of a key head    t / a_kv of each      complete or partial    the first rank's alone
A replicated weight that each rank uses for other tokens or other heads has a partial gradient on each.  Layers sum it
in their backward; with `TensorParallel(coalesce=True)` they leave it to `sum_partial_gradients`, which is called after
the last backward of a step and sends
  2 (t - 1) / t * bytes of these gradients, once per step instead of once per backward.
An optimizer of `dualpipe_lab.dp` over a `Mesh` needs no such call: it sums its own shards of them along tp.
Elsewhere: Megatron `_allreduce_non_tensor_model_parallel_grads` in finalize_model_grads.py; for the norm
`param_is_not_tensor_parallel_duplicate`.
Source: Pascanu et al. 2013 (arXiv 1211.5063), section 3.2: clipping by the norm.
"""

from collections.abc import Collection
from dataclasses import replace

from torch import Tensor, nn

from dualpipe_lab.dp.declaration import partial_of, sum_in_groups
from dualpipe_lab.dp.sharded import ZeroOptions
from dualpipe_lab.dp.synchronizer import synchronizers_of
from dualpipe_lab.tp.config import TensorParallel
from dualpipe_lab.tp.shard import shards_of


def sum_partial_gradients(model: nn.Module) -> None:
    """Sum the gradients that layers with `coalesce` left partial: one message per group of ranks.

    Every rank calls this once per step, after its last backward and before anything reads the gradients.  An optimizer
    over a `Mesh` sums them itself, behind the data ranks, and this leaves its parameters alone.
    """
    summed_later = {p for p in model.parameters() for owner in synchronizers_of(p) if owner.sums_partial}
    partial = [(group, p.grad) for p, group in partial_of(model).items() if p not in summed_later]
    sum_in_groups((group, grad) for group, grad in partial if grad is not None)


def counted_gradients(model: nn.Module) -> list[tuple[Tensor, tuple[str, ...]]]:
    """Return this rank's gradients with their `norm_axes`, as `dp.global_norm` takes them.

    Gradients of replicated parameters have no axis and those of shards have "tp"; replicas that another rank counts
    are left out.
    """
    return [(p.grad, axes) for p, axes in norm_axes(model).items() if p.grad is not None and axes is not None]


def norm_axes(model: nn.Module) -> dict[nn.Parameter, tuple[str, ...] | None]:
    """Return the axes over which each parameter is sharded; None for a replica that another rank counts."""
    shards = shards_of(model)
    found: dict[nn.Parameter, tuple[str, ...] | None] = {}
    for name, parameter in model.named_parameters():
        shard = shards.get(name)
        is_replica = shard is not None and shard.is_replica
        found[parameter] = None if is_replica else () if shard is None else ("tp",)
    return found


def zero_options(model: nn.Module, tp: TensorParallel, options: ZeroOptions | None = None) -> ZeroOptions:
    """Return options for ZeRO along dp under which the gradient norm counts each element of the tp-sharded model once.

    Args:
        model: the model that ZeRO will train, sharded along tp; give ZeRO the group of dp.
        tp: the ranks that share the layers.
        options: all other options; axes that they name already are kept.

    Raises:
        ValueError: layers leave gradients partial, which ZeRO would shard before they are summed.
    """
    if any(getattr(module, "partial", None) for module in model.modules()):
        raise ValueError(
            "ZeRO over a group needs gradients that are complete when a backward ends; give it the Mesh in place of "
            "the group, or use TensorParallel(coalesce=False)"
        )
    options, along_tp = options or ZeroOptions(), norm_axes(model)
    known, others = options.axes_of, tuple(options.norm_groups)

    def axes_of(name: str, parameter: nn.Parameter) -> Collection[str] | None:
        tp_axes, other_axes = along_tp[parameter], known(name, parameter) if known else others
        return None if tp_axes is None or other_axes is None else {*tp_axes, *other_axes}

    return replace(options, axes_of=axes_of, norm_groups={**options.norm_groups, "tp": tp.group})
