"""DualPipe Lab: parallel training algorithms, pipeline schedules and real ranks from a notebook cell.

Names are handed out lazily, so `import dualpipe_lab` takes milliseconds and never imports torch.  In the main process
of an IPython kernel the import also starts the fork server in the background, so that the first `launch` is quick.
Where IPython runs, notebooks show timelines as pictures from then on.
"""

import sys

from dualpipe_lab._display import attach
from dualpipe_lab._facade import make_facade

__version__ = "0.2.0"

make_facade(
    __name__,
    moved={
        "checks": "write `from dualpipe_course import check`",
        "progress": "write `from dualpipe_course import check`, then `check.progress()`",
    },
)
attach()


def _is_kernel() -> bool:
    """Whether this is the main process of an IPython kernel (and not one of its ranks)."""
    kernel = sys.modules.get("ipykernel.kernelapp")
    if kernel is None or not kernel.IPKernelApp.initialized():
        return False
    from multiprocessing import parent_process  # here, because importing pure data should take milliseconds

    return parent_process() is None


def _can_fork() -> bool:
    from dualpipe_lab.launch.operating_system import can_fork

    return can_fork()


if _is_kernel() and _can_fork():
    sys.modules[__name__].start_fork_server()
