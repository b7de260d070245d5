"""DualPipe Lab: parallel training algorithms, pipeline schedules and real ranks from a notebook cell.

Names are handed out lazily, so `import dualpipe_lab` takes milliseconds and never imports torch.  In the main process
of an IPython kernel the import also starts the fork server in the background, so that the first `launch` is quick.
Where IPython runs, notebooks show timelines as pictures from then on.
"""

import sys
from multiprocessing import parent_process

from dualpipe_lab._display import attach
from dualpipe_lab._facade import make_facade
from dualpipe_lab.world.operating_system import can_fork

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
    return kernel is not None and kernel.IPKernelApp.initialized() and parent_process() is None


if can_fork() and _is_kernel():
    sys.modules[__name__].warm()
