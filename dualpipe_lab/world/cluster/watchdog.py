"""The watchdog of a rank under torchrun, Slurm or Kubernetes: what `launch` explains on one machine, on many.

Chapter: book/appendix/gpus.  In: a store of one's own, the environment, a time limit.  Out: RankError, RankTimeout.
  with watching(store(), environment, timeout) as watch:
      value = fn(...)          a thread beats, and asks for a verdict when a rank fails, hangs or falls silent
      watch.returned()         waits for the other ranks: what the ranks exchange now meets nothing of theirs
This module is the main thread's part; `watch_loop` is the thread's.  An exception becomes the same RankError on every
rank.  A main thread that is in Python raises it; one that is blocked inside of GLOO cannot, so its rank prints it, or
is silent where another rank of its node prints it, and exits with code 1.
Elsewhere: torchrun ends the other ranks of a node, says the exit code, and does not know what they waited for.
"""

import faulthandler
import os
import signal
import socket
import sys
import threading
import traceback as traceback_module
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from dualpipe_lab.world import operating_system, payload
from dualpipe_lab.world.cluster import interface
from dualpipe_lab.world.cluster.join import CONNECT_SECONDS
from dualpipe_lab.world.cluster.processes import LOG_FILE, STACK_FILE, OpenPort
from dualpipe_lab.world.cluster.status_store import Member, StatusStore, World
from dualpipe_lab.world.cluster.watch_loop import WatchLoop
from dualpipe_lab.world.folder import private_folder, remove_own
from dualpipe_lab.world.record.operation_log import OperationLog
from dualpipe_lab.world.record.rank_status import RankStatus, StackFrame
from dualpipe_lab.world.supervise.errors import RankFailure, RankTimeout
from dualpipe_lab.world.supervise.failure_report import FailureReport

if TYPE_CHECKING:
    from torch.distributed import Store

_WORLD = str(Path(operating_system.__file__).parent)
ARRIVAL_SECONDS = 1_800.0  # GLOO's own patience: one rank may prepare data before it launches again
VERDICT_SECONDS = 15.0  # for a rank that has failed to hear what the others say
LINGER_SECONDS = 2.0  # after a verdict, for the main thread to print its error although SIGTERM has come


class Watchdog:
    """Watches over one launch; the `with` block ends with the error of the launch if there is one.

    Attributes:
        log: the operation log of this rank, for its context.

    Args:
        store: of torch.distributed; the watchdog makes connections of its own.
        world: this rank among the others.
        timeout: seconds after which the launch is stopped; None for never.
        status: returns the status of this rank, in any thread.
    """

    def __init__(
        self, store: "Store", world: World, timeout: float | None, status: Callable[[int], RankStatus]
    ) -> None:
        self._store = StatusStore.for_next_launch(store, world.rank, world.world_size)
        self._world, self._timeout, self._status = world, timeout, status
        self.finished = False  # the `with` block has ended without an exception
        self.inside = False  # of the user's function, or of the exchange after it
        self.raised = threading.Event()  # the main thread has begun to raise the verdict
        self.closing = threading.Event()  # the main thread has left the `with` block
        self.delivered = threading.Event()  # the verdict, or that there will be none, is known
        self.everyone_returned = threading.Event()
        self.error: BaseException | None = None
        self.signals: int | None = None  # where the numbers of signals are read

    def __enter__(self) -> "Watchdog":
        self._folder = private_folder()
        self.folder = self._folder.__enter__()
        self.log = OperationLog(self.folder / LOG_FILE)
        address = interface.route(self._world.master_addr, self._world.master_port)
        self._port = OpenPort(address)
        self._stacks = open(self.folder / STACK_FILE, "w")
        member = Member(
            self._world.rank, self._world.local_rank, self._world.node, socket.gethostname(), address, self._port.port,
            operating_system.process_space(), os.getpid(), str(self.folder),
        )  # fmt: skip
        self._store.arrive(member)
        patience = CONNECT_SECONDS if self._store.is_first_launch else ARRIVAL_SECONDS  # all have just met
        if late := self._store.wait_for_go(patience):
            self._folder.__exit__(None, None, None)
            raise RankTimeout(f"ranks {late} did not come to this launch within {patience:g} s", [], 0.0)
        self._handle_signals()
        self._loop = WatchLoop(self, self._store, self._world, member, self._timeout, self._status)
        if not self._loop.has_neighbours:
            faulthandler.enable()  # nobody reads this rank's files when it has crashed
        self._loop.start()
        self.inside = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        self.inside, self.finished = False, error is None
        if error is not None and error is not self.error and not isinstance(error, KeyboardInterrupt):
            self._loop.fail(self._failure(error, traceback))
            self.delivered.wait(VERDICT_SECONDS)
        verdict = self.error
        self.closing.set()
        self._close()
        if verdict is not None and error is not verdict:
            raise verdict from None

    def returned(self) -> None:
        """Say that this rank's function has returned, and wait until that of every rank has."""
        self._loop.return_(self._status(self._world.rank))
        self.everyone_returned.wait()

    def interrupt_main(self) -> None:
        """Make the main thread raise the verdict as soon as it runs Python code."""
        number = operating_system.RAISE_SIGNAL
        if self._in_main_thread and number is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def owns_termination(self) -> bool:
        """Whether SIGTERM would have ended this process at once, without the watchdog."""
        return self._in_main_thread and signal.getsignal(signal.SIGTERM) == self._on_terminate

    def terminated(self) -> bool:
        """Whether a SIGTERM has come that only the watchdog handles."""
        return self._terminated and self.owns_termination()

    def read_signals(self) -> None:
        """Note the signals that came, also while the main thread is blocked: the interpreter writes their numbers."""
        assert self.signals is not None
        with suppress(BlockingIOError):
            self._terminated |= signal.SIGTERM in os.read(self.signals, 1 << 10)

    def leave(self, code: int, message: str) -> None:
        """End this process, whose main thread is blocked, after a message on standard error."""
        if message:
            sys.stderr.write(f"{message}\n")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        remove_own()  # this one, and those of the script whose blocks the main thread does not leave
        os._exit(code)

    def _failure(self, error: BaseException, traceback: TracebackType | None) -> tuple[RankFailure, bytes | None]:
        """What this rank reports, and its exception if that can travel."""
        cause, frames, text, exception = describe(error, traceback)
        report = FailureReport(self.folder, set(), self._world.world_size)
        return report.raised(self._world.rank, cause, frames, text, None), exception

    def _handle_signals(self) -> None:
        """Let the thread know of SIGTERM while the main thread is blocked, and let it interrupt the main thread."""
        self._terminated = False
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        self._had_faulthandler = faulthandler.is_enabled()
        faulthandler.enable(self._stacks)
        if operating_system.CLUSTER_STACK_SIGNAL is not None:
            faulthandler.register(operating_system.CLUSTER_STACK_SIGNAL, self._stacks)
        if not self._in_main_thread:
            return
        if operating_system.RAISE_SIGNAL is not None:
            signal.signal(operating_system.RAISE_SIGNAL, self._on_raise)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_terminate)
            self.signals, self._signals_end = os.pipe()
            for end in (self.signals, self._signals_end):
                os.set_blocking(end, False)
            _give_forks_their_own_signals(weakref.ref(self))
            self._wakeup_before = signal.set_wakeup_fd(self._signals_end, warn_on_full_buffer=False)

    def _on_raise(self, number: int, frame: FrameType | None) -> None:
        if self.inside and self.error is not None:
            self.raised.set()
            if frame is None or frame.f_code is not Watchdog.__exit__.__code__:  # it would leave without its cleanup
                raise self.error

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        if self.closing.is_set():  # the error of the launch is on its way out
            timer = threading.Timer(LINGER_SECONDS, self.leave, (128 + number, ""))
            timer.daemon = True
            timer.start()

    def _close(self) -> None:
        """End the thread, and give back what the watchdog has taken."""
        self._loop.stop()
        was_terminated = self.terminated()
        if self.owns_termination() and self.error is None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.signals is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self.signals)
            os.close(self._signals_end)
        if operating_system.CLUSTER_STACK_SIGNAL is not None:
            faulthandler.unregister(operating_system.CLUSTER_STACK_SIGNAL)
        faulthandler.disable()
        if self._had_faulthandler:
            faulthandler.enable()
        self._stacks.close()
        self._port.close()
        self._folder.__exit__(None, None, None)
        if was_terminated and self.error is None:  # too late for a verdict, and not to be lost
            os.kill(os.getpid(), signal.SIGTERM)


def watching(store: "Store", world: World, timeout: float | None) -> Watchdog:
    """Watch over the launch of this rank inside of a `with` block.

    Raises:
        RankError: a rank raised, died or exited, or its node vanished; on every rank.
        RankTimeout: the ranks are in a deadlock, or `timeout` passed; on every rank.
    """
    from dualpipe_lab.world.rank import rank_status

    return Watchdog(store, world, timeout, rank_status)


def describe(error: BaseException, traceback: TracebackType | None) -> tuple[str, list[StackFrame], str, bytes | None]:
    """Cause in one line, frames, traceback, and the pickled exception if it can be pickled; as a rank of `launch`."""
    if isinstance(error, SystemExit):
        cause = f"left with sys.exit({error.code!r})"
    else:
        cause = "raised " + "".join(traceback_module.format_exception_only(error)).strip()
    own = traceback
    while own is not None and own.tb_next is not None and _is_here(own):
        own = own.tb_next
    frames = [StackFrame(item.filename, item.lineno or 0, item.name) for item in traceback_module.extract_tb(own)]
    text = "".join(traceback_module.format_exception(type(error), error, own))
    try:
        travels = payload.dumps(error)
        payload.loads(travels)
    except Exception:
        return cause, frames, text, None
    return cause, frames, text, travels


def _give_forks_their_own_signals(found: "weakref.ref[Watchdog]") -> None:
    """Let SIGTERM end a process that the script forks; its numbers of signals would come to this rank.

    The signal is held while the fork is under way, because it may come to the child before its first line.
    """

    def owning() -> bool:
        watch = found()
        return watch is not None and watch.signals is not None and watch.owns_termination()

    def hold(how: int) -> None:
        if owning():
            signal.pthread_sigmask(how, [signal.SIGTERM])

    def forget() -> None:
        if owning():
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    os.register_at_fork(
        before=partial(hold, signal.SIG_BLOCK),
        after_in_parent=partial(hold, signal.SIG_UNBLOCK),
        after_in_child=forget,
    )


def _is_here(traceback: Any) -> bool:
    """Whether a frame belongs to the launch itself."""
    return str(traceback.tb_frame.f_code.co_filename).startswith(_WORLD)
