"""Hosts on one machine: network namespaces that are joined by a switch, with addresses of their own and nothing beyond.

    with network(2) as (first, second):
        first.start([sys.executable, "script.py"])

Chapter: book/hosts/many-hosts.  Needs Linux, root and iproute2; `obstacle` says what is missing.
Each host is a namespace with loopback and one interface, `eth0`, at 10.99.x.1, 10.99.x.2, ...; the switch is a bridge
in one more namespace, so that nothing is added to the machine's own network.  At the end every process in them is
killed and the namespaces are deleted, and with them their links.  `Host.slow_down` limits an interface's rate (tc tbf).
"""

import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from dualpipe_lab.world.operating_system import is_running

INTERFACE = "eth0"
_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """One namespace: its name and the address of its interface."""

    name: str
    address: str

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on this host; `options` are those of Popen."""
        return subprocess.Popen([_ip_path(), "netns", "exec", self.name, *command], **options)  # noqa: S603

    def run(self, *command: str) -> str:
        """Run a command on this host to its end; return its output."""
        return _ip("netns", "exec", self.name, *command)

    def pids(self) -> list[int]:
        """The processes that run on this host."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def kill(self, seconds: float = 10.0) -> None:
        """Kill every process of this host at once, as a power cut would, and cut its link first."""
        self.cut()
        _kill_all(self.name, seconds)

    def cut(self) -> None:
        """Take the host's interface down: it falls silent, and no connection is closed."""
        self.run("ip", "link", "set", INTERFACE, "down")

    def join(self) -> None:
        """Take the host's interface up again, after `cut` or `kill`."""
        self.run("ip", "link", "set", INTERFACE, "up")

    def slow_down(self, rate: str) -> None:
        """Limit what leaves this host, to `10mbit` for instance."""
        self.run(
            "tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", "rate", rate, "burst", "32kb", "latency", "400ms"
        )


@cache
def obstacle() -> str:
    """Why no hosts can be made here; empty if they can."""
    if shutil.which("ip") is None:
        return "no network namespaces here: there is no ip (iproute2)"
    try:
        with network(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"


@contextmanager
def network(num_hosts: int) -> Iterator[list[Host]]:
    """Make hosts on one switch, and remove all of it."""
    _sweep()
    mark = f"dpl{os.getpid()}-{next(_numbers)}"
    switch = f"{mark}-s"
    made = [Host(f"{mark}-{number}", f"10.99.{os.getpid() % 250}.{number + 1}") for number in range(num_hosts)]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for number, host in enumerate(made):
            _ip("netns", "add", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
            port = f"port{number}"
            _ip("-n", host.name, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            _ip("-n", host.name, "link", "set", INTERFACE, "up")
            _ip("-n", switch, "link", "set", port, "master", "switch", "up")
        yield made
    finally:
        for name in (*(host.name for host in made), switch):
            _remove(name)


def _sweep() -> None:
    """Delete the namespaces of test processes that were killed."""
    for name in re.findall(r"^(dpl\d+-\S+)", _ip("netns", "list"), re.MULTILINE):
        if not is_running(int(re.findall(r"[0-9]+", name)[0])):
            _remove(name)


def _remove(name: str) -> None:
    with suppress(subprocess.CalledProcessError):
        _kill_all(name, 10.0)
    with suppress(subprocess.CalledProcessError):
        _ip("netns", "delete", name)


def _kill_all(name: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (pids := _ip("netns", "pids", name).split()) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)


def _ip(*arguments: str) -> str:
    return subprocess.run([_ip_path(), *arguments], check=True, capture_output=True, text=True).stdout  # noqa: S603


def _ip_path() -> str:
    return shutil.which("ip") or "/usr/sbin/ip"
