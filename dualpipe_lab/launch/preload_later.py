"""Makes the fork server import, when it has listened for a second, what torch's first optimizer step needs.

In: nothing.  Out: LATE_IMPORT in `sys.modules`.  Only the fork server of a kernel's ranks imports this module.
That import takes as long as torch's own, and no rank of the first launch needs to wait for it.  The handler of a
signal runs in the server's one thread, between two forks, so no rank is forked in the middle of an import.
"""

import contextlib
import gc
import importlib
import signal
from types import FrameType

from dualpipe_lab._private import LATE_IMPORT

DELAY_SECONDS = 1.0


def _import(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with contextlib.suppress(ImportError):
        importlib.import_module(LATE_IMPORT)
    gc.freeze()  # as in `preload`


signal.signal(signal.SIGALRM, _import)
signal.setitimer(signal.ITIMER_REAL, DELAY_SECONDS)
