"""Counting what autograd keeps alive between a forward and its backward."""

import weakref
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Kept:
    """A saved tensor; it is gone when the graph that saved it is."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Saved:
    """While entered, counts the tensors that autograd keeps; `peak` is the most at once."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self._hooks = saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def __enter__(self) -> "Saved":
        self._hooks.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._hooks.__exit__(*details)

    def _pack(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        weakref.finalize(kept, self._release)
        self.live += 1
        self.peak = max(self.peak, self.live)
        return kept

    def _release(self) -> None:
        self.live -= 1
