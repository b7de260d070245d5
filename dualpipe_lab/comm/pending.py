"""`Pending`: the one handle for every result that is still on its way."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from dualpipe_lab.comm.work import Work

T = TypeVar("T")


class Pending(Generic[T]):
    """A result whose messages are under way; every function named `start_...` returns one.

    The tensors that were given to the function must not change, and what it returns must not be read, before `wait`.

    Args:
        works: the messages to wait for, in this order; None is a message that was not needed.
        finish: makes the result when they have arrived; what it refers to stays alive until then.
    """

    def __init__(self, works: Sequence[Work | None], finish: Callable[[], T]) -> None:
        self._works, self._finish = works, finish
        self._result: list[T] = []

    def wait(self) -> T:
        """Complete the messages and return the result; the second time, at once."""
        if not self._result:
            for work in self._works:
                if work is not None:
                    work.wait()
            self._result.append(self._finish())
            del self._works, self._finish
        return self._result[0]
