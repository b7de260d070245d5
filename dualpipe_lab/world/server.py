"""Where ranks come from: a fork server that has imported torch already, or a pool of spawned processes without one.

The fork server is a process that never computes, so forking it is safe, and a rank costs milliseconds instead of
seconds.  Where it does not exist or does not work, ranks are spawned, which imports torch in each, and kept for the
next launch.  `DUALPIPE_LAB_START=forkserver|spawn` overrides the choice.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from dualpipe_lab._private import LATE_IMPORT, stop_fork_server
from dualpipe_lab.world.folder import sweep
from dualpipe_lab.world.supervise.errors import StartupError

OVERRIDE = "DUALPIPE_LAB_START"
MAX_TMPDIR_BYTES = 60  # a socket's path has 107 bytes on Linux, 103 on macOS, and multiprocessing appends 32
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108  each launch makes a private folder in it
# torch imports LATE_IMPORT at the first optimizer step, in every rank: seconds there, once here
_PRELOAD = ["torch", LATE_IMPORT, "torch.distributed", "dualpipe_lab.world.rank", "dualpipe_lab.comm"]


@dataclass
class RankProcess:
    """A process that serves as a rank, and the launcher's ends of its pipes."""

    process: BaseProcess
    channel: "Connection[Any, Any]"
    out: "Connection[Any, Any]"
    err: "Connection[Any, Any]"

    def kill(self) -> None:
        """End the process and whatever it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()

    def close(self) -> None:
        """Collect the dead process and close its pipes."""
        self.process.join()
        for connection in (self.channel, self.out, self.err):
            connection.close()
        self.process.close()


def start_method() -> str:
    """`forkserver` where it exists, else `spawn`; the environment variable decides if it is set.

    Raises:
        ValueError: if the variable names neither.
        RuntimeError: on Windows, where neither GLOO nor these processes are known to work.
    """
    if sys.platform == "win32":
        raise RuntimeError("ranks need Linux or macOS; on Windows use WSL2 (appendix: troubleshooting)")
    chosen = os.environ.get(OVERRIDE, "")
    if chosen not in ("", "forkserver", "spawn"):
        raise ValueError(f"{OVERRIDE} is forkserver or spawn, got {chosen!r}")
    return chosen or ("forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn")


def warm() -> None:
    """Start the fork server in the background; it imports torch while the caller goes on (12 ms here, 2 s there)."""
    sweep()
    if start_method() != "forkserver":
        return
    _keep_socket_paths_short()
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOAD)
    resource_tracker.ensure_running()  # it unblocks interrupts when it starts, so it has to be first
    with interrupts_held(), _package_on_path():
        forkserver.ensure_running()


def _keep_socket_paths_short() -> None:
    """Let `multiprocessing` make its folder elsewhere if TMPDIR is too long for the path of a socket."""
    if len(os.fsencode(tempfile.gettempdir())) <= MAX_TMPDIR_BYTES:
        return
    writable = (folder for folder in SHORT_FOLDERS if os.access(folder, os.W_OK | os.X_OK))
    with _hiding:
        before, tempfile.tempdir = tempfile.tempdir, next(writable, tempfile.tempdir)
        try:
            util.get_temp_dir()  # made once, then kept for the life of this process
        finally:
            tempfile.tempdir = before


def reset() -> None:
    """Start afresh: a new fork server (after editing an imported module) or an empty pool."""
    _discard_pool()
    stop_fork_server()
    warm()


def start(count: int) -> list[RankProcess]:
    """Start `count` ranks, or take them from the pool.

    Raises:
        StartupError: if the fork server does not answer.
    """
    method = start_method()
    ranks: list[RankProcess] = []
    try:
        if method == "forkserver":
            warm()
        while method == "spawn" and _pool and len(ranks) < count:
            ranks.append(_pool.pop())
        if method == "spawn" and len(ranks) < count and not os.environ.get(OVERRIDE):
            _warn_of_spawn("this platform has no fork server")
        while len(ranks) < count:
            ranks.append(_start_one(method))
    except BaseException as error:
        retire(ranks, reusable=False)
        if isinstance(error, (EOFError, OSError)):
            raise StartupError(f"cannot start ranks by {method}: {error}") from error
        raise
    return ranks


def retire(ranks: list[RankProcess], reusable: bool) -> None:
    """End the ranks of a launch; spawned ones that did well are kept."""
    if reusable and start_method() == "spawn":
        for rank in ranks:
            rank.channel.send(("release",))
        _pool.extend(ranks)
        return
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.close()


def fall_back() -> None:
    """Use spawn from now on, and say so: forked ranks die here before they can say hello."""
    os.environ[OVERRIDE] = "spawn"
    _warn_of_spawn("forked ranks die on this machine before they start")


def _warn_of_spawn(reason: str) -> None:
    warnings.warn(
        f"{reason}, so ranks are spawned: each imports torch, which takes seconds at the first launch; "
        "they are then kept for the next ones",
        stacklevel=6,
    )


_hiding = threading.Lock()
_pool: list[RankProcess] = []  # spawned processes cannot be had again for less than seconds, so they are kept


@atexit.register
def _discard_pool() -> None:
    while _pool:
        rank = _pool.pop()
        rank.kill()
        rank.close()


def _start_one(method: str) -> RankProcess:
    from dualpipe_lab.world.rank import rank_main

    context: Any = multiprocessing.get_context(method)
    channel, far_channel = context.Pipe(duplex=True)
    out, far_out = context.Pipe(duplex=False)
    err, far_err = context.Pipe(duplex=False)
    process = context.Process(target=rank_main, args=(far_channel, far_out, far_err), name="rank")
    try:
        with interrupts_held(), _hidden_main():
            process.start()
    finally:
        for connection in (far_channel, far_out, far_err):
            connection.close()
    return RankProcess(process, channel, out, err)


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep the ranks from importing the caller's script again: what they need of it travels by value."""
    with _hiding:  # two threads that hid each other's stand-in would lose the real module
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Start a process with interrupts blocked: Ctrl-C reaches the whole group, but only the kernel may act on it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _package_on_path() -> Iterator[None]:
    """Let the fork server find this package even if only `sys.path` knows it (it reads the environment alone)."""
    before = os.environ.get("PYTHONPATH")
    here = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join([here, before] if before else [here])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
