"""Rank processes: forked from a fork server that has imported torch, or spawned.

Chapter: book/start/ranks-and-messages.  In: a number of ranks.  Out: processes with pipes to the launcher.
  forkserver   `torch.multiprocessing.get_context("forkserver")`: milliseconds per rank; the server never computes, so
               forking it is safe
  spawn        `torch.multiprocessing.spawn`: seconds per rank, because each imports torch
`DUALPIPE_LAB_START=forkserver|spawn` overrides the choice; so does `launch(start=)`, for one launch.
torch.multiprocessing is the standard library's module with one addition: its pipes send a tensor as a handle to shared
memory.  Nothing of a launch is sent so: the pipes carry bytes that `payload` made.
"""

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
from functools import cache
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, get_args

from dualpipe_lab._private import LATE_IMPORT, is_watched, stop_fork_server
from dualpipe_lab.launch import operating_system
from dualpipe_lab.launch.folder import sweep
from dualpipe_lab.launch.supervise.errors import StartupError

StartMethod = Literal["forkserver", "spawn"]
OVERRIDE = "DUALPIPE_LAB_START"
MAX_TMPDIR_BYTES = 60  # a socket's path has 107 bytes on Linux, 103 on macOS, and multiprocessing appends 32
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108  each launch makes a private folder in it
_PRELOAD = ["dualpipe_lab.launch.preload"]
_LATER = "dualpipe_lab.launch.preload_later"
SILENCE_SECONDS = 2.0


@dataclass
class RankProcess:
    """Process of one rank, with the launcher's ends of its pipes."""

    process: BaseProcess
    channel: "Connection[Any, Any]"
    out: "Connection[Any, Any]"
    err: "Connection[Any, Any]"

    def kill(self) -> None:
        """Kill the process and its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()

    def close(self) -> None:
        """Join the dead process and close its pipes."""
        self.process.join()
        for connection in (self.channel, self.out, self.err):
            connection.close()
        self.process.close()


def start_method() -> str:
    """`forkserver` where the platform has it, else `spawn`; the environment variable overrides both.

    Raises:
        ValueError: the variable has another value.
        RuntimeError: on Windows, where neither GLOO nor these processes are known to work.
    """
    if not operating_system.can_fork():
        raise RuntimeError("ranks need Linux or macOS; on Windows use WSL2 (appendix: troubleshooting)")
    chosen = os.environ.get(OVERRIDE, "")
    if chosen not in ("", *get_args(StartMethod)):
        raise ValueError(f"{OVERRIDE} is forkserver or spawn, got {chosen!r}")
    return chosen or ("forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn")


def start_fork_server() -> None:
    """Start the fork server in the background: this call takes 12 ms, the server imports torch for 1 s.

    In a kernel the server is there before the learner's first launch, and imports a second later what the first
    optimizer step needs; in a script the first launch waits for that, too, or every rank would import it.
    """
    sweep()
    if start_method() != "forkserver":
        return
    _keep_socket_paths_short()
    last = _LATER if "ipykernel.kernelapp" in sys.modules else LATE_IMPORT
    multiprocessing.get_context("forkserver").set_forkserver_preload([*_PRELOAD, last])
    resource_tracker.ensure_running()  # it unblocks interrupts when it starts, so it has to be first
    with interrupts_held(), _package_on_path():
        try:
            forkserver.ensure_running()
        except ChildProcessError:  # it is the parent's, and outlives this process and what its ranks hold up
            stop_fork_server()
            forkserver.ensure_running()


def _keep_socket_paths_short() -> None:
    """Make the folder of `multiprocessing` in a short path if TMPDIR is too long for the path of a socket."""
    if len(os.fsencode(tempfile.gettempdir())) <= MAX_TMPDIR_BYTES:
        return
    writable = (folder for folder in SHORT_FOLDERS if os.access(folder, os.W_OK | os.X_OK))
    with _hide_lock:
        before, tempfile.tempdir = tempfile.tempdir, next(writable, tempfile.tempdir)
        try:
            util.get_temp_dir()  # made once, then kept for the life of this process
        finally:
            tempfile.tempdir = before


def restart_fork_server() -> None:
    """Restart the fork server; needed after editing an imported module."""
    stop_fork_server()
    start_fork_server()


def start(count: int, method: StartMethod | None = None) -> list[RankProcess]:
    """Start `count` ranks by a method (default: that of `start_method`).

    Raises:
        StartupError: the fork server does not answer.
    """
    chosen = method or start_method()
    ranks: list[RankProcess] = []
    notice = threading.Timer(SILENCE_SECONDS, _say_what_is_waited_for)
    notice.daemon = True
    if is_watched():
        notice.start()
    try:
        if chosen == "forkserver":
            start_fork_server()
        elif method is None and not os.environ.get(OVERRIDE):
            _warn_of_spawn("this platform has no fork server")
        with interrupts_held():  # an import of torch that an interrupt cuts short cannot be repeated
            import torch.multiprocessing  # noqa: F401  after `start_fork_server`: the fork server imports torch meanwhile
        if chosen == "spawn":
            return _start_spawned(count)
        while len(ranks) < count:
            ranks.append(_start_forked())
    except BaseException as error:
        retire(ranks)
        if isinstance(error, (EOFError, OSError)):
            raise StartupError(f"cannot start ranks by {chosen}: {error}") from error
        raise
    finally:
        notice.cancel()
    return ranks


@cache
def _say_what_is_waited_for() -> None:
    print("starting the server of ranks, once per kernel", file=sys.stderr, flush=True)


def retire(ranks: list[RankProcess]) -> None:
    """End the processes of a launch."""
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.close()


def fall_back() -> None:
    """Use spawn from now on and warn: forked ranks die on this machine before their first message."""
    os.environ[OVERRIDE] = "spawn"
    _warn_of_spawn("forked ranks die on this machine before they start")


def _warn_of_spawn(reason: str) -> None:
    warnings.warn(
        f"{reason}, so ranks are spawned: each imports torch, which takes seconds",
        stacklevel=6,
    )


_hide_lock = threading.Lock()


def _start_forked() -> RankProcess:
    from torch.multiprocessing import get_context

    from dualpipe_lab.launch.rank import rank_main

    context: Any = get_context("forkserver")
    near, far = _pipes(context)
    try:
        process = context.Process(target=rank_main, args=far, name="rank")
        with interrupts_held(), _hidden_main():
            process.start()
    finally:
        _close(far)
    return RankProcess(process, *near)


def _start_spawned(count: int) -> list[RankProcess]:
    """Call `torch.multiprocessing.spawn`: an importable function, and the same arguments for every process."""
    from torch.multiprocessing import get_context, spawn

    from dualpipe_lab.launch.rank import spawned_rank

    near, far = zip(*(_pipes(get_context("spawn")) for _ in range(count)), strict=True)
    try:
        with interrupts_held(), _hidden_main():
            processes = spawn(spawned_rank, args=(far,), nprocs=count, join=False).processes
    except BaseException:
        for ends in near:
            _close(ends)  # a rank that has started already ends when its pipe does
        raise
    finally:
        for ends in far:
            _close(ends)
    return [RankProcess(process, *ends) for process, ends in zip(processes, near, strict=True)]


Ends = tuple["Connection[Any, Any]", "Connection[Any, Any]", "Connection[Any, Any]"]


def _pipes(context: Any) -> tuple[Ends, Ends]:
    """Make the pipes of one rank, for messages, output and errors: the launcher's ends and the rank's."""
    channel, far_channel = context.Pipe(duplex=True)
    out, far_out = context.Pipe(duplex=False)
    err, far_err = context.Pipe(duplex=False)
    return (channel, out, err), (far_channel, far_out, far_err)


def _close(ends: Ends) -> None:
    for connection in ends:
        connection.close()


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep the ranks from importing the caller's script again; its functions travel by value."""
    with _hide_lock:  # two threads that hid each other's stand-in would lose the real module
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Block interrupts while a process starts: Ctrl-C reaches the process group, but only the kernel acts on it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _package_on_path() -> Iterator[None]:
    """Put this package on PYTHONPATH, because the fork server does not get `sys.path`."""
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
