"""`emulated_hosts`: torchrun on several hosts that are groups of processes on this machine, and the loss of one.

    with lab.emulated_hosts(2) as hosts:
        hosts.start("train.py", ranks_per_host=2)
        hosts.wait_for("step 3")
        hosts.kill(1)
        run = hosts.end()

Chapter: book/hosts/many-hosts, book/hosts/failures.  In: a script.  Out: what each host printed, and its exit code.
Each host is a torchrun of its own with its ranks: they have the numbers and variables of ranks on a cluster, and share
this machine's network and clock.
Elsewhere: containers as nodes (Kubernetes in Docker, Slurm's --enable-multiple-slurmd); Mininet.
"""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dualpipe_lab.launch.cluster.environment import ONE_MACHINE
from dualpipe_lab.launch.operating_system import processes_with

_ADDRESS = "127.0.0.1"
RENDEZVOUS = "last_call_timeout=5"  # seconds for more hosts after `min_hosts` have come; torchrun waits 30
MARK = "DUALPIPE_LAB_EMULATED_HOST"  # in the environment of every process of a host: which one it is
_NOISE = re.compile(r"^\[?[WI]\d{4} |^\*{9}")  # torchrun's own lines that no reader needs


@dataclass(frozen=True)
class HostsRun:
    """How a job ended.

    Attributes:
        outputs: by host, what its ranks and its torchrun printed.
        codes: by host, the exit code of torchrun; negative for a signal.
        seconds: from the start to the end of the last torchrun.
    """

    outputs: list[str]
    codes: list[int]
    seconds: float


@dataclass
class EmulatedHosts:
    """Hosts on this machine; one job at a time.

    Attributes:
        folder: where the job's files belong that all hosts share, such as checkpoints; removed at the end.
        num_hosts: number of hosts.
    """

    folder: Path
    num_hosts: int
    _mark: str = field(default_factory=lambda: secrets.token_hex(6))
    _agents: dict[int, "subprocess.Popen[Any]"] = field(default_factory=dict)
    _num_jobs: int = 0
    _began: float = 0.0

    def start(
        self, script: str | Path, *arguments: object, ranks_per_host: int = 2, min_hosts: int | None = None,
        max_restarts: int = 0,
    ) -> None:  # fmt: skip
        """Start torchrun on the hosts.

        Args:
            script: path of the script that every rank runs.
            arguments: of the script.
            ranks_per_host: ranks that torchrun starts on a host.
            min_hosts: torchrun goes on with so many hosts when the others are lost (default: all of them).
            max_restarts: how often torchrun starts the ranks again.

        Raises:
            FileNotFoundError: there is no such script.
            RuntimeError: a job runs already.
            ValueError: fewer hosts than `min_hosts`.
        """
        if not Path(script).is_file():
            raise FileNotFoundError(f"emulated hosts run a script that every host sees, and there is no {script}")
        if any(agent.poll() is None for agent in self._agents.values()):
            raise RuntimeError("emulated hosts run one job at a time; call end() before the next start()")
        if min_hosts is not None and not 1 <= min_hosts <= self.num_hosts:
            raise ValueError(f"min_hosts is from 1 to the {self.num_hosts} hosts of the job, got {min_hosts}")
        self._num_jobs += 1
        self._agents = {}
        self._began = time.perf_counter()
        nodes = f"{min_hosts}:{self.num_hosts}" if min_hosts else str(self.num_hosts)
        endpoint, job = f"{_ADDRESS}:{_free_port()}", f"{self._mark}-{self._num_jobs}"
        for host in range(self.num_hosts):
            rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", job]
            where = ["--rdzv-conf", f"is_host={int(host == 0)},{RENDEZVOUS}", "--local-addr", _ADDRESS]
            sizes = ["--nnodes", nodes, "--nproc-per-node", str(ranks_per_host), "--max-restarts", str(max_restarts)]
            command = [sys.executable, "-m", "torch.distributed.run", *sizes, *rendezvous, *where]
            command += ["--monitor-interval", "1", str(script), *map(str, arguments)]
            own = {MARK: f"{self._mark}-{host}", ONE_MACHINE: "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
            with self._path(host).open("w") as output:
                self._agents[host] = subprocess.Popen(  # noqa: S603
                    command, stdout=output, stderr=output, env=os.environ | own, start_new_session=True
                )

    def wait_for(self, pattern: str, seconds: float = 120.0) -> str:
        """Wait until a host prints a line with this pattern (re), and return the line.

        Raises:
            TimeoutError: nothing of the kind was printed in time; the message has what was printed instead.
        """
        deadline = time.monotonic() + seconds
        while True:
            is_over = all(agent.poll() is not None for agent in self._agents.values())
            text = "\n".join(map(self.output, self._agents))
            if found := re.search(f"^.*(?:{pattern}).*$", text, re.MULTILINE):
                return found[0]
            if is_over or time.monotonic() > deadline:
                why = "the job ended" if is_over else f"{seconds:g} s passed"
                raise TimeoutError(f"{why}, and no host has printed {pattern!r}; printed was:\n{text}")
            time.sleep(0.05)

    def output(self, host: int) -> str:
        """Return the output of a host in this job so far, without torchrun's own lines."""
        path = self._path(host)
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join(line for line in lines if not _NOISE.search(line))

    def kill(self, host: int) -> None:
        """Kill every process of the host: its torchrun and its ranks, until nothing is left.

        This closes its connections, so that the others hear of it at once; a pulled cable, which closes nothing, is not
        emulated.
        """
        agent = self._agents[host]
        with suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        while found := processes_with(f"{MARK}={self._mark}-{host}"):  # one may start another while we look (Linux)
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        agent.wait()

    def end(self, seconds: float = 300.0) -> HostsRun:
        """Wait for the end of the job.

        Raises:
            TimeoutError: a torchrun still ran after so many seconds; all of them are killed then.
        """
        deadline = time.monotonic() + seconds
        try:
            codes = [agent.wait(max(deadline - time.monotonic(), 0)) for agent in self._agents.values()]
        except subprocess.TimeoutExpired:
            text = "\n".join(map(self.output, self._agents))
            self._close()
            raise TimeoutError(f"the job ran longer than {seconds:g} s; printed was:\n{text}") from None
        return HostsRun(list(map(self.output, self._agents)), codes, time.perf_counter() - self._began)

    def _path(self, host: int) -> Path:
        return self.folder / f"job-{self._num_jobs}-host-{host}.txt"

    def _close(self) -> None:
        for host in self._agents:
            self.kill(host)


@contextmanager
def emulated_hosts(num_hosts: int = 2) -> Iterator[EmulatedHosts]:
    """Make hosts on this machine for jobs of torchrun; everything of them is removed at the end.

    Raises:
        ValueError: fewer than one host.
    """
    if num_hosts < 1:
        raise ValueError(f"emulated_hosts makes hosts from 1, got num_hosts={num_hosts}")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        hosts = EmulatedHosts(Path(folder), num_hosts)
        try:
            yield hosts
        finally:
            hosts._close()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((_ADDRESS, 0))
        return int(listener.getsockname()[1])
