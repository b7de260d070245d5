"""The fork server of kernels: a process with one thread that has imported torch and ipykernel, and forks kernels.

Run as a script, so that nothing of the course is imported: a notebook that forgets such an import fails here, too.
In: the number of a socket; each byte on it brings one descriptor, a kernel's connection, on which its call follows.
Out: kernels; on the connection, as `NUMBER`, the process id and later how the process ended.  A kernel whose connection
is closed is killed; the server ends when its socket is closed, and kernels end with it.  Kernels share what a process
has from birth, such as the seed of `hash`, and nothing that one of them does.
Elsewhere: `multiprocessing.forkserver`, whose own server, that of a kernel's ranks, is forked here as well.
"""

import contextlib
import fcntl
import gc
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import types
from collections.abc import Sequence
from multiprocessing import util
from typing import Any

TORCH = ("torch.distributed", "torch._dynamo")  # the second is imported by the first optimizer step, for a second
IMPORTED = (*TORCH, "IPython", "ipykernel.kernelapp", "ipywidgets", "matplotlib.pyplot")
NUMBER = struct.Struct("q")
MAX_DESCRIPTORS = 16  # three streams, and two or three of multiprocessing


def serve(requests: socket.socket) -> socket.socket | None:
    """Fork a kernel for each request; return its connection in the kernel, and None when nobody can ask any more."""
    poll, kernels = select.poll(), dict[int, tuple[int, int, int]]()  # by either descriptor: id, process, connection
    poll.register(requests, select.POLLIN)
    while True:
        found, _ = poll.poll()[0]  # one at a time, because it may close another
        if found in kernels:
            pid, *descriptors = kernels[found]
            if found == descriptors[1]:  # nobody wants this kernel any more
                os.kill(pid, signal.SIGKILL)
            _send(descriptors[1], os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            for each in descriptors:
                poll.unregister(each)
                os.close(each)
                del kernels[each]
        elif descriptors := socket.recv_fds(requests, 1, 1)[1]:
            if (pid := os.fork()) == 0:
                for each in (requests.detach(), *kernels):
                    os.close(each)
                return socket.socket(fileno=descriptors[0])
            process, connection = os.pidfd_open(pid), descriptors[0]
            kernels[process] = kernels[connection] = pid, process, connection
            poll.register(process, select.POLLIN)
            poll.register(connection, 0)  # its end alone: what comes on it is the kernel's
            _send(connection, pid)
        else:
            return None


def _send(connection: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(connection, NUMBER.pack(number))


def send_call(connection: socket.socket, descriptors: Sequence[int], **call: Any) -> None:
    """Send what a process gets from who starts it: three streams, other descriptors by number, and the rest."""
    socket.send_fds(connection, [b"\n"], descriptors)
    connection.sendall(json.dumps(call | {"numbers": [0, 1, 2, *descriptors[3:]]}).encode() + b"\n")


def take_call(connection: socket.socket) -> dict[str, Any]:
    """Wait for a call and take over its descriptors, environment, folder and arguments; end if nobody calls."""
    with connection, connection.makefile() as lines:
        received = socket.recv_fds(connection, 1, MAX_DESCRIPTORS)[1]
        call: dict[str, Any] = json.loads(lines.readline()) if received else sys.exit()
    above = [fcntl.fcntl(each, fcntl.F_DUPFD, max(call["numbers"]) + 1) for each in received]
    for each, number in zip(above, call["numbers"], strict=True):
        os.dup2(each, number, inheritable=number <= 2)
    for each in {*above, *received} - {*call["numbers"]}:
        os.close(each)
    os.environ.clear()
    os.environ.update(call["environment"])
    os.chdir(call["folder"])
    tempfile.tempdir = None  # torch has asked for it, before this environment
    sys.argv[:] = call["arguments"]
    return call


def run_kernel(connection: socket.socket) -> None:
    """Run what `python -m ipykernel_launcher` runs, as the first process of a session."""
    os.setsid()
    take_call(connection)
    sys.argv.insert(0, str(getattr(importlib.util.find_spec("ipykernel_launcher"), "origin", "")))
    os.environ["JPY_PARENT_PID"] = str(os.getppid())
    importlib.invalidate_caches()
    sys.modules["torch"].default_generator.seed()  # drawn at the import; Python's own generator draws at every fork
    sys.modules["numpy"].random.seed()
    keep_rank_server()
    sys.modules["ipykernel.kernelapp"].launch_new_instance()


def keep_rank_server() -> None:
    """Fork the process that becomes the fork server of this kernel's ranks, while this process has one thread.

    `multiprocessing` starts its server by `spawnv_passfds`: the first time, this process is called instead.
    """
    near, far = socket.socketpair()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # an interrupt of the kernel is for its cells
    if (pid := os.fork()) == 0:
        near.close()
        run_rank_server(far)
    far.close()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    spawn = util.spawnv_passfds

    def call_or_spawn(path: Any, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
        command = os.fsdecode(arguments[-1])
        if near.fileno() >= 0 and "multiprocessing.forkserver" in command:
            with near, contextlib.suppress(OSError):  # somebody may have killed it
                blocked = [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
                call = {"environment": dict(os.environ), "folder": os.getcwd(), "arguments": ["-c"], "blocked": blocked}
                send_call(near, [0, 1, 2, *descriptors], command=command, **call)
                return pid
        return spawn(path, arguments, descriptors)

    util.spawnv_passfds = call_or_spawn  # type: ignore[assignment]


def run_rank_server(connection: socket.socket) -> None:
    """Wait for the call, then run what `python -c` runs."""
    call = take_call(connection)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = dict.fromkeys(["", *map(os.path.abspath, filter(None, paths)), *sys.path])
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    signal.pthread_sigmask(signal.SIG_SETMASK, call["blocked"])
    exec(call["command"], vars(main))  # noqa: S102
    sys.exit()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # this file's folder
    os.environ["JPY_PARENT_PID"] = str(os.getpid())  # ipykernel reads it when imported: kernels end with this process
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")  # as ipykernel does before a cell
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # a kernel's collections leave these pages shared
    if asked := serve(socket.socket(fileno=int(sys.argv[1]))):
        run_kernel(asked)
