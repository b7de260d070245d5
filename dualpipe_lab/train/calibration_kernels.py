"""`kernels_of`: the kernels that a call reaches, as matrix products and as bytes that elementwise work moves.

In: a call.  Out: kind, size and number of each kernel.
  product       mm, bmm, addmm, baddbmm: 2 FLOPs for each multiplication and addition, those of a batch together
  elementwise   everything else that writes: the bytes of what it reads and of what it writes
  nothing       views, which move nothing
Elsewhere: torch `FlopCounterMode`, which has sums by operation, no sizes, and not what `addmm_` adds in place.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from dualpipe_lab._private import dispatch_mode, tree_leaves
from dualpipe_lab.train.calibration import Kernel

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")


def kernels_of(call: Callable[[], object]) -> tuple[Kernel, ...]:
    """Return the kernels of a call, in the order of their kinds and sizes.

    Args:
        call: runs once.

    >>> import torch
    >>> x = torch.ones(2, 3)
    >>> kernels_of(lambda: (x + x).t() @ x)
    (('elementwise', 72.0, 1), ('product', 36.0, 1))
    """
    found: Counter[tuple[Any, float]] = Counter()

    class Recorder(dispatch_mode()):  # type: ignore[misc]  # the class comes from a function
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            kernel = _kernel(str(func).split(".")[1], _tensors((args, kwargs)), _tensors(out))
            if kernel is not None:
                found[kernel] += 1
            return out

    with Recorder():
        call()
    return tuple((kind, size, number) for (kind, size), number in sorted(found.items()))


def _kernel(name: str, given: list[Tensor], made: list[Tensor]) -> tuple[str, float] | None:
    """Return kind and size of one operation; None if it is a view, or returns no tensor."""
    writes_given = name.endswith("_")
    if name.removesuffix("_") in _PRODUCTS:
        return "product", 2.0 * made[0].numel() * given[-2].shape[-1]
    places = {_place(tensor) for tensor in given}
    if not made or (not writes_given and all(_place(tensor) in places for tensor in made)):
        return None
    return "elementwise", float(sum(_bytes(tensor) for tensor in [*given, *made]))


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor in memory: an expanded one has fewer than its elements."""
    return min(int(tensor.numel() * tensor.element_size()), int(tensor.untyped_storage().nbytes()))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
