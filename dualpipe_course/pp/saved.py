"""Counting what is kept between a forward and its backward: by autograd, and by anybody."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Kept:
    """A saved tensor; it is gone when the graph that saved it is."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Saved:
    """While entered, counts the tensors that autograd keeps; `peak` is the most at once.

    Tensors for which `free` is true are kept and not counted.
    """

    def __init__(self, free: Callable[[Tensor], bool] = lambda tensor: False) -> None:
        self.live = self.peak = 0
        self._free = free
        self._hooks = saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def __enter__(self) -> "Saved":
        self._hooks.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._hooks.__exit__(*details)

    def _pack(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        if self._free(tensor):
            return kept
        weakref.finalize(kept, self._release)
        self.live += 1
        self.peak = max(self.peak, self.live)
        return kept

    def _release(self) -> None:
        self.live -= 1


def held() -> int:
    """The floating-point numbers in all live tensors of Python; views of the same memory count once."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor) and one.is_floating_point()]
    memory = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() // one.element_size() for one in tensors}
    return sum(memory.values())
