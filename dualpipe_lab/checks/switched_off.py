"""A learner's function that runs with some of the library's own switched off: the exercise is to write them."""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any


class Without:
    """A function that cannot call what these names stand for: `module:function` or `module:Class.method`.

    What it was given as an argument it can call, unless that is named too.
    """

    def __init__(self, fn: Callable[..., Any], *names: str) -> None:
        self.fn, self.names = fn, names

    def __call__(self, *args: Any) -> Any:
        """Call the function; this process ends afterwards, so nothing is switched on again."""

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("the exercise is to write this yourself; the library's own is switched off here")

        for name in self.names:
            # its code, because the learner may hold the function itself
            resolve_name(name).__code__ = refuse.__code__
        return self.fn(*args)
