"""Counting matrix products: the calls that reach torch's kernels while the counter is entered."""

from collections.abc import Sequence
from typing import Any

import torch

from dualpipe_lab._private import dispatch_mode

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm, _aten.addmm, _aten.addmm_, _aten.bmm, _aten.baddbmm, _aten.baddbmm_}


class Products(dispatch_mode()):  # type: ignore[misc]  # torch is untyped to mypy
    """Counts matrix products in `number`, those that autograd makes among them."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the kernel; count it if it is a product."""
        self.number += func.overloadpacket in _PRODUCTS
        return func(*args, **(kwargs or {}))
