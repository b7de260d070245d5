"""`Pending`: the handle of a result whose operations are still running.

In: works, and a function that builds the result.  Out: the result, from `wait`.
Elsewhere: `torch.futures.Future.then`; `AsyncCollectiveTensor` of torch's functional collectives.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from dualpipe_lab.comm.work import Work

T = TypeVar("T")


class Pending(Generic[T]):
    """Handle of a result whose operations are still running; every function named `start_...` returns one.

    Until `wait` returns, the caller must not change the input tensors of the function and must not read its outputs.

    Args:
        works: operations to wait for, in this order; None stands for an operation that was not needed.
        finish: builds the result after all of them are complete; it keeps alive the tensors that it refers to.
    """

    def __init__(self, works: Sequence[Work | None], finish: Callable[[], T]) -> None:
        self._works, self._finish = works, finish
        self._result: list[T] = []

    def wait(self) -> T:
        """Wait for the operations and return the result; a second call returns it at once."""
        if not self._result:
            for work in self._works:
                if work is not None:
                    work.wait()
            self._result.append(self._finish())
            del self._works, self._finish
        return self._result[0]
