"""Starts a notebook's kernel by forking, at the place that Jupyter has for other ways to start one.

In: a kernel's command, environment, folder and streams.  Out: a process that Jupyter polls, interrupts and kills.
The ordinary way, LocalProvisioner, is taken where forking is none: no Linux, another Python, pipes, a dead fork server.
"""

import atexit
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Any

from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from dualpipe_course.kernels import fork_server

COMMAND = [sys.executable, "-m", "ipykernel_launcher"]
LONGEST_PLACE = 100  # characters; the system's limit for a socket's path is 107
STARTUP_SECONDS = 180.0  # the fork server imports torch, maybe on a busy machine
# Python and torch read these once, when they start: kernels that differ in one of them have different fork servers.
READ_AT_START = ("HOME", "LANG", "LC_", "LD_", "MKL_", "MPL", "OMP_", "OPENBLAS_", "PYTHON", "TORCH_", "TZ", "XDG_")


class ForkedProvisioner(LocalProvisioner):
    """Starts a kernel by forking, or else as ever."""

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Give the kernel sockets in a folder: a port that is free now may be taken when the kernel binds it."""
        manager = self.parent
        place = os.path.join(tempfile.gettempdir(), f"kernel-{self.kernel_id}")
        if manager and manager.transport == "tcp" and len(place) < LONGEST_PLACE:
            manager.transport, manager.ip, manager.cache_ports = "ipc", place, False
        return await super().pre_launch(**kwargs)

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> Any:
        """Start a kernel; return how to connect to it."""
        kernel = _fork(cmd, **self._scrub_kwargs(kwargs))
        if kernel is None:
            return await super().launch_kernel(cmd, **kwargs)
        self.process: Any = kernel
        self.pid = self.pgid = kernel.pid
        self.cwd = kwargs.get("cwd", os.getcwd())
        return self.connection_info


class ForkedKernel(subprocess.Popen[bytes]):
    """A child of the fork server, which tells how it ends."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self.returncode, self._connection = pid, None, connection

    def poll(self) -> int | None:
        """Return how the process ended, or None while it runs."""
        with suppress(BlockingIOError):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            data = b""
            with suppress(ConnectionResetError):
                data = self._connection.recv(fork_server.NUMBER.size)
            self.returncode = fork_server.NUMBER.unpack(data)[0] if data else -signal.SIGKILL  # ended with the server
            self._connection.close()
        return self.returncode


def _fork(cmd: list[str], env: dict[str, str], **options: Any) -> ForkedKernel | None:
    """Ask the fork server for a kernel; None if Jupyter wants what a fork cannot give, or nobody answers."""
    folder, *streams = (options.pop(name, None) for name in ("cwd", "stdout", "stderr"))
    out, err = (each.fileno() if hasattr(each, "fileno") else each or 0 for each in streams)
    if cmd[:3] != COMMAND or options or min(out, err) < 0:  # subprocess.PIPE is -1
        return None
    near, far = socket.socketpair()
    near.settimeout(STARTUP_SECONDS)
    with suppress(AttributeError, OSError), far, open(os.devnull) as nothing:
        socket.send_fds(start_server(settings(env)), [b"\n"], [far.fileno()])
        far.close()  # the server's alone, so that its end is seen
        call = {"environment": env, "folder": os.path.abspath(folder or "."), "arguments": cmd[3:]}
        fork_server.send_call(near, [nothing.fileno(), out or 1, err or 2], **call)
        if data := near.recv(fork_server.NUMBER.size):
            return ForkedKernel(fork_server.NUMBER.unpack(data)[0], near)
    near.close()
    return None


def settings(environment: dict[str, str]) -> frozenset[tuple[str, str]]:
    """Return what of a kernel's environment its fork server has to be started with."""
    return frozenset(item for item in environment.items() if item[0].startswith(READ_AT_START))


@functools.cache
def start_server(env: frozenset[tuple[str, str]]) -> socket.socket:
    """Start a fork server, once for this process and those forked from it later; AttributeError without Linux."""
    os.close(os.pidfd_open(os.getpid()))
    near, far = socket.socketpair()
    command, fds = [sys.executable, fork_server.__file__, str(far.fileno())], [far.fileno()]
    with far:
        server = subprocess.Popen(command, env=dict(env), cwd="/", pass_fds=fds, start_new_session=True)  # noqa: S603
    atexit.register(server.wait)  # the last registered is called first
    atexit.register(server.terminate)
    return near
