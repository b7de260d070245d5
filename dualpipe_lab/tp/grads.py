"""Gradients of a tensor-parallel model after the backward: which are complete, and the sum of those that are not.

Chapters: book/tp/rmsnorm, book/tp/block.  In: modules that name their `shards` and their `partial` parameters.
Out: gradients that are equal on all replicas.  The norm is that of `dualpipe_lab.dp.ModelSpec`.
  parameter                 on the ranks of tp    gradient there         in the norm
  sharded: linear layers    other shards          complete               a sum over tp
  replicated: norms         the same              complete or partial    once; summed over tp, it would count t times
  replicas of a KV head    t / a_kv of each      complete or partial    the first rank's alone
Elsewhere: Megatron `_allreduce_non_tensor_model_parallel_grads`; for the norm `param_is_not_tensor_parallel_duplicate`.
Source: Pascanu et al. 2013 (arXiv 1211.5063), section 3.2: clipping by the norm.
"""

from torch import Tensor, nn

from dualpipe_lab.comm.groups import Group, group_of, members
from dualpipe_lab.grad_ready import synchronizers_of
from dualpipe_lab.grad_sums import all_reduce_together_async


def sum_partial_gradients(model: nn.Module) -> None:
    """Sum the gradients that layers with `coalesce` left partial: one message per group of ranks.

    A replicated weight that each rank uses for other tokens or other heads has a partial gradient on each.  Layers sum
    it in every backward; with `TensorParallel(coalesce=True)` they leave it to this function, which every rank calls
    once per step, after its last backward and before anything reads the gradients.  It sends 2 (t - 1) / t times their
    bytes.  An optimizer over a `Mesh` sums them itself, behind the data ranks, and this leaves its parameters alone.
    """
    by_ranks: dict[tuple[int, ...], list[Tensor]] = {}
    for parameter, group in partial_of(model).items():
        if parameter.grad is not None and not any(owner.sums_partial for owner in synchronizers_of(parameter)):
            by_ranks.setdefault(members(group), []).append(parameter.grad)
    for ranks, grads in by_ranks.items():
        all_reduce_together_async(grads, group_of(ranks)).wait()


def partial_of(module: nn.Module) -> dict[nn.Parameter, Group | None]:
    """Return the parameters whose gradients layers with `coalesce` leave partial, and the ranks of their sum."""
    return {
        layer.get_parameter(name): group
        for layer in module.modules()
        for name, group in (getattr(layer, "partial", None) or {}).items()
    }
