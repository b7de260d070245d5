"""Arguments that a learner's function must leave as they are: others may need them still."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Kept:
    """Tensors by name as they are now.  On a rank: make it before the call, `check()` after it."""

    def __init__(self, **tensors: "Tensor") -> None:
        self._pairs = {name: (tensor, tensor.detach().clone()) for name, tensor in tensors.items()}

    def check(self) -> None:
        """Raise if one of them has changed.

        Raises:
            RuntimeError: with the name of the tensor.
        """
        changed = [name for name, (tensor, before) in self._pairs.items() if not tensor.detach().equal(before)]
        if changed:
            raise RuntimeError(f"the argument {changed[0]} has changed; leave it as it is and work on a copy")
