"""torch's global modes: a function on a rank computes under those of its caller, as it would in the caller's process.

In: a process that has imported torch.  Out: the modes that its next operation would meet, set in another process.
Carried: default dtype and device, gradient and inference mode, autocast, deterministic algorithms, float32's precision,
and how tensors are printed.  Not carried: settings of a back end (`torch.backends`), hooks, and modes of a class of the
caller's (`TorchFunctionMode`), which hold objects of its process.
Elsewhere: `torch.multiprocessing` and `DataLoader` carry none of them.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from dualpipe_lab._private import print_options

Modes = dict[str, Any]
_AUTOCAST = ("cpu", "cuda")


def modes_of_caller() -> Modes | None:
    """The modes of this thread; None where torch is not imported, since nobody has set any then."""
    return _read() if "torch" in sys.modules else None


@contextmanager
def under(modes: Modes | None) -> Iterator[None]:
    """Run the `with` block under these modes; afterwards this process has its own again, whatever the block has set."""
    import torch

    own = _read()
    with ExitStack() as stack:
        stack.callback(torch.clear_autocast_cache)
        stack.callback(_write, own)
        if modes is not None:
            if modes["inference"]:
                stack.enter_context(torch.inference_mode())
            _write(modes)
        yield


def _modes() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """What reads each mode, and what sets it."""
    import torch

    return {
        "dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "device": (
            lambda: torch.get_default_device().type,  # without a number: each rank has a GPU of its own
            lambda kind: torch.set_default_device(None if kind == "cpu" else kind),
        ),
        "grad": (torch.is_grad_enabled, torch.set_grad_enabled),
        "inference": (torch.is_inference_mode_enabled, lambda value: None),  # `under` enters it
        "autocast": (
            lambda: [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST],
            _write_autocast,
        ),
        "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        "deterministic": (
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1]),
        ),
        "precision": (_read_precision, lambda name: name and torch.set_float32_matmul_precision(name)),
        "print": (print_options, lambda options: torch.set_printoptions(**options)),
    }


def _read() -> Modes:
    return {name: read() for name, (read, _) in _modes().items()}


def _write(modes: Modes) -> None:
    """Set what differs: a default device, even the CPU, would slow down every call."""
    for name, (read, write) in _modes().items():
        if modes[name] != read():
            write(modes[name])


def _read_precision() -> str | None:
    import torch

    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:  # torch tells none of these names once one of `torch.backends` is set
        return None


def _write_autocast(values: list[tuple[bool, Any]]) -> None:
    import torch

    for kind, (enabled, dtype) in zip(_AUTOCAST, values, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
