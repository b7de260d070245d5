"""What nodes of an autograd graph have saved for their backward, and how to let go of it before the graph dies.

In: nodes of a graph that stays alive.  Out: memory, once nothing but the node held it.
"""

from collections.abc import Iterable
from typing import Any

from dualpipe_lab._private import saved_tensors
from dualpipe_lab.pp.runtime.recompute import Saved


def free(nodes: Iterable[Any]) -> None:
    """Drop the saved tensors of nodes that will not run again."""
    for node in nodes:
        for saved in saved_tensors(node):
            if saved.unpack_hook is None:
                saved.register_hooks(_drop, _refuse)
            elif isinstance(saved.data, Saved):
                saved.data.drop()


def held_by_others(node: Any) -> bool:
    """Whether somebody's own hooks keep what the node saved: to unpack it may cost a forward (or a trip to a disk)."""
    return any(saved.unpack_hook is not None and not isinstance(saved.data, Saved) for saved in saved_tensors(node))


def _drop(tensor: object) -> None:
    return None


def _refuse(nothing: object) -> None:
    raise RuntimeError("I has freed this activation, and W does not need it: does something else walk the graph?")
