"""Private interfaces of torch and CPython, each behind one name: for a new version this is the one place to look at.

In: a torch of the range in pyproject.toml.  Out: functions that the library calls instead of the private names.
`tests/test_private.py` has a test for each, which says what breaks when the interface changes, and refuses a private
name of torch or CPython in any other module.  torch is imported by the functions that need it, not by this module.
The range's lower end, torch 2.10, is the first release whose `SavedTensor` has `data` and `unpack_hook`; every other
name here, and every name of torch.distributed in `comm`, is older.  Looked up in the wheels of 2.9.0, 2.10.0 and
2.14.1; the tests run on 2.13.0, and ran once on 2.14.1, those of this module on 2.15.0 too.
"""

import pickle
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from functools import cache
from operator import attrgetter
from typing import Any, Protocol

# autograd's graph


def accumulate_grad_node() -> Any:
    """Return the type of an autograd node that adds to a parameter's `grad`: a leaf of the graph."""
    import torch

    return torch._C._functions.AccumulateGrad


def reentrant_checkpoint_node() -> Any:
    """Return the type of the node that a reentrant `torch.utils.checkpoint` leaves in the graph."""
    from torch.utils.checkpoint import CheckpointFunction

    return CheckpointFunction._backward_cls


class SavedTensor(Protocol):
    """What a node of the graph has saved: torch's `SavedTensor`.

    Attributes:
        data: the tensor, or what a pack hook returned; None once it is dropped.
        unpack_hook: the hook that turns `data` into a tensor; None without hooks.
    """

    data: Any
    unpack_hook: Any

    def register_hooks(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any], /) -> None:
        """Replace `data` by what `pack` returns for it; refused where hooks exist already."""


def saved_tensors(node: Any) -> Iterator[SavedTensor]:
    """Yield what a node of the graph has saved for its backward and not dropped yet."""
    kind: Any = type(node)
    for name in _names_of_saved(kind):
        value = getattr(node, name)
        for saved in value if isinstance(value, tuple) else (value,):
            if saved.data is not None:
                yield saved


@cache
def _names_of_saved(kind: Hashable) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


# autograd's engine


def post_accumulate_grad_hooks(tensor: Any) -> list[Callable[[Any], None]]:
    """Return what `register_post_accumulate_grad_hook` has registered on a tensor."""
    hooks: dict[int, Any] = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
    return list(hooks.values())


def num_hooks() -> int:
    """Return how many hooks this process has registered so far, on tensors, nodes of the graph and modules."""
    from torch.utils.hooks import RemovableHandle

    return int(RemovableHandle.next_id)


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call back when the backward that is running ends; RuntimeError outside of a backward."""
    from torch.autograd import Variable

    Variable._execution_engine.queue_callback(callback)


def run_kernel(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation as it is, whatever classes of tensors are among its arguments."""
    import torch

    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def is_kernel(func: Any) -> bool:
    """Return whether this is an operation below autograd, as a mode with `__torch_dispatch__` calls it."""
    import torch

    return isinstance(func, torch._ops.OpOverload)


def backward_id() -> int:
    """Return a number that differs from one run of the engine to the next; -1 outside of a backward."""
    import torch

    return int(torch._C._current_graph_task_id())


# The number of changes in place that autograd has seen on a tensor or its views, but not on its `.data`.
version_of: Callable[[Any], int] = attrgetter("_version")


# calls and containers


def dispatch_mode() -> Any:
    """Return `TorchDispatchMode`, the class whose subclasses see every operation that reaches a kernel."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples, dicts and registered types, in order."""
    from torch.utils import _pytree

    return list(_pytree.tree_leaves(tree))


def print_options() -> dict[str, Any]:
    """Return what `torch.set_printoptions` has set, by the names of its arguments."""
    from torch import _tensor_str

    return dict(vars(_tensor_str.PRINT_OPTS))


def plain_name(name: str) -> str:
    """Return a name without what `torch.compile` puts before the names of a module.

    >>> plain_name("_orig_mod.blocks.0._orig_mod.weight")
    'blocks.0.weight'
    """
    return name.replace("_orig_mod.", "")


# torch.distributed, and what torch imports late


def source_rank(work: Any) -> int:
    """Return the global rank whose message a finished `irecv` from any rank has received."""
    return int(work._source_rank())


LATE_IMPORT = "torch._dynamo"  # torch imports it at the first optimizer step, for seconds: the fork server does so once
REBUILDERS = {
    "torch._utils": ("_rebuild_parameter", "_rebuild_parameter_with_state")
}  # what pickles of parameters call


# ipykernel, CPython


def is_watched() -> bool:
    """Whether somebody reads along: a terminal, or a notebook's front end that could be asked for input."""
    kernel = getattr(getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)(), "kernel", None)
    return sys.stderr.isatty() if kernel is None else bool(getattr(kernel, "_allow_stdin", False))


def fork_server_pid() -> int | None:
    """Return the process id of the running fork server; None before it starts."""
    pid: int | None = _fork_server()._forkserver_pid
    return pid


def stop_fork_server() -> None:
    """End the fork server, or forget the one of a parent's; the next process that is asked for starts a new one."""
    server: Any = _fork_server()
    module: Any = sys.modules["multiprocessing.forkserver"]
    with suppress(ChildProcessError):  # the parent goes on using it
        server._stop()
    server._forkserver_pid = server._forkserver_address = None
    if vars(server).pop("ensure_running", None):  # `assume_fork_server` has been called
        module.ensure_running = server.ensure_running


def release_fork_server() -> int | None:
    """Forget this process's end of the pipe that keeps the fork server alive, and return it for closing."""
    server = _fork_server()
    end: int | None = server._forkserver_alive_fd
    server._forkserver_alive_fd = None
    return end


def assume_fork_server() -> None:
    """Use the parent's fork server: asked whether it runs, `multiprocessing` would wait for it as for an own child."""
    from multiprocessing import forkserver

    module: Any = forkserver
    module.ensure_running = _fork_server().ensure_running = lambda: None


def _fork_server() -> Any:
    from multiprocessing import forkserver  # not in a browser's Python, which has no processes

    server: Any = forkserver._forkserver
    return server


PythonUnpickler = pickle._Unpickler  # its opcodes can be replaced; those of C's `pickle.Unpickler` cannot
