"""ZeRO over layers that are cut along tp: the norm that clips counts every element of the whole model once.

Chapter: book/tp/block.  In: a model cut along tp, options of ZeRO.  Out: options whose norm spans the tp ranks.
  parameter                  on the ranks of tp    in the norm
  cut: linear layers         other parts           a sum over tp
  replicated: norms          the same              once; summed over tp, it would count t times
  copies of a key head       t / a_kv each         the first rank's; the others leave theirs out
Along the ranks of ZeRO each parameter is dealt out, and its shards add up as always.
Elsewhere: Megatron `param_is_not_tensor_parallel_duplicate`, asked for every gradient before its norm is taken.
Source: Pascanu et al. 2013 (arXiv 1211.5063), section 3.2: clipping by the norm.
"""

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from dualpipe_lab.dp.sharded import Options
from dualpipe_lab.tp.config import TensorParallel
from dualpipe_lab.tp.shard import norm_axes


def count_once(model: nn.Module, tp: TensorParallel, options: Options | None = None) -> Options:
    """Options for any stage of ZeRO along dp, with a norm of the gradient that spans the ranks of tp.

    Args:
        model: what ZeRO will train, cut along tp; give ZeRO the group of dp.
        tp: the ranks that share the layers.
        options: all else; axes that they name already are kept.

    Raises:
        ValueError: layers leave gradients partial, which ZeRO would deal out before they are summed.
    """
    if any(getattr(module, "partial", None) for module in model.modules()):
        raise ValueError("ZeRO needs gradients that are whole when a backward ends; use TensorParallel(coalesce=False)")
    options, along_tp = options or Options(), norm_axes(model)
    known, others = options.axes_of, tuple(options.norm_groups)

    def axes_of(name: str, parameter: nn.Parameter) -> Collection[str] | None:
        own, kept = along_tp[parameter], known(name, parameter) if known else others
        return None if own is None or kept is None else {*own, *kept}

    return replace(options, axes_of=axes_of, norm_groups={**options.norm_groups, "tp": tp.group})
