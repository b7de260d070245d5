"""Gives the kernels of pages ports that no other program is given by chance.

Jupyter asks the system for a free port, lets go of it, and tells the kernel, which binds it a moment later.  In between
the system may give that port to a rank of another page, and then the kernel dies: seen once in some dozens of builds
with two pages at once.  Ports below the system's own range are given to nobody who asks for any port.
If kernels are forked, their server starts before Sphinx forks the processes that read pages: they share it.
A kernel that does not start all the same, seen once more on a crowded machine, is replaced before its page has run a
cell; what a page itself does wrong is never tried twice.
In: the Sphinx application.  Out: where Jupyter looks for ports, and a second kernel for a page whose first is dead.
Elsewhere: https://github.com/jupyter/jupyter_client/issues/487.
"""

import os
import socket
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from typing import Any

from jupyter_client.connect import LocalPortCache
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

LOWEST, TRIALS = 10_000, 1_000
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # Linux; elsewhere the range begins above this default
USUAL = 32_768
NOT_STARTED = ("Kernel didn't respond in", "Kernel died before replying to kernel_info")  # before any cell has run
_execute = NotebookClient.async_execute


def candidates() -> range:
    """Return the ports below those that the system hands out itself; at least some thousand."""
    try:
        first = int(RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = USUAL
    return range(LOWEST, max(first, LOWEST + 10_000))


def find_available_port(cache: LocalPortCache, ip: str) -> int:
    """Return a free port, drawn anew in each process of the build.

    Raises:
        OSError: no port can be bound at this address.
    """
    for trial in range(TRIALS):
        port = SystemRandom().choice(candidates())
        with socket.socket() as other:
            try:
                other.bind((ip, port))
            except OSError:
                if trial == TRIALS - 1:
                    raise
                continue
        if port not in cache.currently_used_ports:
            cache.currently_used_ports.add(port)
            return port
    raise OSError(f"{TRIALS} ports at {ip} are all in use")


async def execute(client: NotebookClient, reset_kc: bool = False, **options: Any) -> Any:
    """Execute a page; if its kernel does not start, with another one."""
    try:
        return await _execute(client, reset_kc, **options)
    except RuntimeError as error:
        if not str(error).startswith(NOT_STARTED):
            raise
        client.km = None
        return await _execute(client, reset_kc, **options)


def share_server(app: Sphinx, env: BuildEnvironment, names: list[str]) -> None:
    """Start the fork server of kernels if there is a page to read."""
    if names and os.environ.get("JUPYTER_DEFAULT_PROVISIONER_NAME") == "forked":
        from dualpipe_course.kernels import provisioner

        with suppress(AttributeError, OSError):
            provisioner.start_server(provisioner.settings(dict(os.environ)))


def setup(app: Sphinx) -> dict[str, Any]:
    """Replace Jupyter's search and its way to execute a page, and connect the handler."""
    LocalPortCache.find_available_port = find_available_port  # type: ignore[assignment, method-assign]
    NotebookClient.async_execute = execute  # type: ignore[assignment, method-assign]
    NotebookClient.execute = run_sync(execute)
    app.connect("env-before-read-docs", share_server)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
