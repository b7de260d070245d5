"""DualPipe Lab: parallel training algorithms, pipeline schedules and real ranks from a notebook cell.

Names are handed out lazily, so `import dualpipe_lab` takes milliseconds and never imports torch.  In the main process
of an IPython kernel the import also starts the fork server in the background, so that the first `launch` is quick.
"""

import os
import sys
from importlib import import_module
from multiprocessing import parent_process
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Timeline": "timeline",
    "Action": "pp.program",
    "Overlap": "pp.program",
    "Program": "pp.program",
    "Cost": "pp.cost",
    "simulate": "pp.simulator",
    "validate": "pp.validator",
    "InvalidProgram": "pp.validator",
    "explain": "pp.explain",
    "lower": "pp.lowering",
    "PipelineRuntime": "pp.runtime",
    "Topology": "topology",
    "Mesh": "world.mesh",
    "launch": "world.launcher",
    "reset": "world.server",
    "warm": "world.server",
    "RankError": "world.errors",
    "RankTimeout": "world.errors",
    "Link": "world.link",
    "NodeLink": "world.link",
    "compute": "world.context",
    "now": "world.context",
    "progress": "checks.progress_page",
    "span": "world.context",
    "nccl_ready": "world.backends",
}
_MODULES = {"comm": "world.comm", "schedules": "pp.schedules", "viz": "viz", "checks": "checks"}

__all__ = sorted([*_HOMES, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{_MODULES[name]}")
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _is_kernel() -> bool:
    """Whether this is the main process of an IPython kernel (and not one of its ranks)."""
    kernel = sys.modules.get("ipykernel.kernelapp")
    return kernel is not None and kernel.IPKernelApp.initialized() and parent_process() is None


if _is_kernel() and os.name == "posix":
    __getattr__("warm")()
