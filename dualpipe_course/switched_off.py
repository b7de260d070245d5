"""A learner's function that runs with some of the library's own switched off: the exercise is to write them."""

from collections.abc import Callable
from contextlib import ExitStack
from inspect import unwrap
from pkgutil import resolve_name
from types import FunctionType, ModuleType
from typing import Any

from dualpipe_lab.launch import operating_system

AUTOGRAD = ("torch.autograd:grad", "torch.autograd:backward", "torch:Tensor.backward")  # where it is done by hand


class Without:
    """A function that cannot call what these names stand for: `module:function`, `module:Class.method` or `module`.

    Of a module nothing that is written there can be called.  What the function was given as an argument it can call,
    unless that is named too.
    """

    def __init__(self, fn: Callable[..., Any], *names: str) -> None:
        self.fn, self.names = fn, names

    def __call__(self, *args: Any) -> Any:
        """Call the function; on a page everything is switched on again, elsewhere the process ends soon."""
        undo = ExitStack()
        for name in self.names:
            found = resolve_name(name)
            for value in _written_in(found) if isinstance(found, ModuleType) else [found]:
                if isinstance(value, type):
                    _put(undo, value, "__init__", _refuse)
                    if isinstance(vars(value).get("forward"), staticmethod):  # an autograd Function is never made
                        _put(undo, value, "forward", staticmethod(_refuse))
                else:
                    # its code, because the learner may hold the function; below decorators, which are closures
                    _put(undo, unwrap(value), "__code__", _refuse.__code__)
        try:
            return self.fn(*args)
        finally:
            if operating_system.in_browser():  # where the next answer is judged by the same process
                undo.close()


def _put(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type) and name not in vars(owner):
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, vars(owner)[name] if isinstance(owner, type) else getattr(owner, name))
    setattr(owner, name, value)


def _written_in(module: ModuleType) -> list[Any]:
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    return [value for value in own if isinstance(value, (FunctionType, type))]


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("the exercise is to write this yourself; the library's own is switched off here")
