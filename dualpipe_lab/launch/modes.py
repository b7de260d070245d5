"""torch's global modes: a function on a rank computes under those of its caller, as it would in the caller's process.

In: a process that has imported torch.  Out: the modes that its next operation would meet, set in another process.
Carried: default dtype and device, gradient and inference mode, autocast, deterministic algorithms, float32's precision,
kernels of attention, cuDNN and oneDNN, anomaly detection, denormal numbers, and how tensors are printed.
Not carried: hooks, and modes of a class of the caller's (`TorchFunctionMode`), which hold objects of its process.
Elsewhere: `torch.multiprocessing` and `DataLoader` carry none of them.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any

from dualpipe_lab._private import print_options

Modes = dict[str, Any]
_CALLS = {  # in torch: what reads a mode, and what sets it
    "get_default_dtype": "set_default_dtype",
    "is_grad_enabled": "set_grad_enabled",
    "is_autocast_cache_enabled": "set_autocast_cache_enabled",
    "backends.cuda.flash_sdp_enabled": "backends.cuda.enable_flash_sdp",
    "backends.cuda.mem_efficient_sdp_enabled": "backends.cuda.enable_mem_efficient_sdp",
    "backends.cuda.math_sdp_enabled": "backends.cuda.enable_math_sdp",
    "backends.cuda.cudnn_sdp_enabled": "backends.cuda.enable_cudnn_sdp",
    "backends.mha.get_fastpath_enabled": "backends.mha.set_fastpath_enabled",
}
_ATTRIBUTES = (
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.mkldnn.enabled",
    "utils.deterministic.fill_uninitialized_memory",
)
_PRECISIONS = ("backends.mkldnn.matmul.fp32_precision", "backends.cuda.matmul.fp32_precision")
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


def _read() -> Modes:
    import torch

    modes: Modes = {name: attrgetter(name)(torch)() for name in _CALLS}
    modes |= {name: attrgetter(name)(torch) for name in _ATTRIBUTES}
    modes["inference"] = torch.is_inference_mode_enabled()
    return modes | {name: read() for name, (read, _) in _others().items()}


def _write(modes: Modes) -> None:
    """Set what differs: a default device, even the CPU, would slow down every call."""
    import torch

    now, others = _read(), _others()
    for name, value in modes.items():
        if value == now[name] or name == "inference":
            continue
        if name in _CALLS:
            attrgetter(_CALLS[name])(torch)(value)
        elif name in others:
            others[name][1](value)
        else:
            _set_attribute(name, value)


def _others() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Modes of more than one value, with what reads and what sets them."""
    import torch

    return {
        "device": (
            lambda: torch.get_default_device().type,  # without a number: each rank has a GPU of its own
            lambda kind: torch.set_default_device(None if kind == "cpu" else kind),
        ),
        "deterministic": (
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1]),
        ),
        "precision": (_read_precision, _write_precision),
        "autocast": (
            lambda: [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST],
            _write_autocast,
        ),
        "anomaly": (
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda both: torch.autograd.set_detect_anomaly(*both),
        ),
        "denormal": (lambda: sys.float_info.min / 2 == 0, torch.set_flush_denormal),  # torch has no question for it
        "print": (print_options, lambda options: torch.set_printoptions(**options)),
    }


def _read_precision() -> str | tuple[str, ...]:
    """The one name of `set_float32_matmul_precision`, or those of torch 2.9's settings where the caller used these."""
    import torch

    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:  # torch tells none of the old names once a new one is set
        return tuple(attrgetter(name)(torch) for name in _PRECISIONS)


def _write_precision(precision: str | tuple[str, ...]) -> None:
    import torch

    if isinstance(precision, str):
        torch.set_float32_matmul_precision(precision)
    else:
        for name, value in zip(_PRECISIONS, precision, strict=True):
            _set_attribute(name, value)


def _write_autocast(values: list[tuple[bool, Any]]) -> None:
    import torch

    for kind, (enabled, dtype) in zip(_AUTOCAST, values, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def _set_attribute(name: str, value: Any) -> None:
    import torch

    owner, _, attribute = name.rpartition(".")
    setattr(attrgetter(owner)(torch), attribute, value)
