"""Agents of torchrun for tests, without the seconds that every rank's `import torch` takes: they fork their ranks.

  python -m torchrun_cases.agents   imports once, then starts one of torch's elastic agents per host for each line
`Agents` is the tests' end: `begin` starts a case, `end` waits for it and returns what its hosts printed.
A host is a network namespace, or None for this machine.
"""

import faulthandler
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
PATIENCE = 120  # seconds for what takes a few where nothing else runs
PORT = 29_400


@dataclass(frozen=True)
class Outcome:
    """What one case came to.

    Attributes:
        texts: what the ranks of each host printed, agent included.
        codes: exit code of each host's agent; negative for a signal.
        seconds: from the begin of the last rank's function to the end of each host's last rank, not of its agent.
    """

    texts: list[str]
    codes: list[int]
    seconds: list[float]

    @property
    def text(self):
        """All that was printed."""
        return "\n".join(self.texts)

    def values(self):
        """By rank, what `launch` returned, as text."""
        return dict(re.findall(r"^VALUES (\d+) (.*)$", self.text, re.MULTILINE))


class Agents:
    """The process that starts the agents; one case at a time."""

    def __init__(self, folder, first_port=PORT):
        self.folder, self._first_port = Path(folder), first_port
        environment = os.environ | {"PYTHONPATH": f"{TESTS.parent}:{TESTS}", "OMP_NUM_THREADS": "1"}
        environment["TMPDIR"] = str(self.folder)  # what its ranks leave behind is there, apart from that of other tests
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torchrun_cases.agents"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._number = 0

    def begin(
        self, kind, hosts=(None,), ranks_per_host=3, timeout=60.0, restarts=0, job=None, least=None, rendezvous=(),
        patience=PATIENCE, ahead=0,
    ):  # fmt: skip
        """Start a case: on each host, an agent with so many ranks that run `kinds.<kind>`, or a training.

        Args:
            job: of `trainings.main`, which then runs instead of a kind.
            least: number of hosts with which the ranks start too, as in `--nnodes 1:2`; all by default.
            rendezvous: settings of torch's rendezvous beside those of every case.
            patience: seconds after which the agents are killed.
            ahead: seconds by which the clock of each host's ranks is before that of the host before it.
        """
        self._number += 1
        self.case = {
            "kind": kind,
            "hosts": [host and host.name for host in hosts],
            "addresses": [host and host.address for host in hosts],
            "address": "localhost" if hosts[0] is None else hosts[0].address,
            "ranks_per_host": ranks_per_host,
            "timeout": timeout,
            "restarts": restarts,
            "patience": patience,
            "ahead": ahead,
            "job": job,
            "least": least or len(hosts),
            "rendezvous": dict(rendezvous),
            "port": self._first_port + self._number,  # the agents of a case that was hit may still be at the last one
            "run": f"case-{self._number}",
            "outputs": [str(self.folder / f"{self._number}-{number}") for number in range(len(hosts))],
        }
        self._process.stdin.write(json.dumps(self.case) + "\n")
        self._process.stdin.flush()

    def text(self):
        """What has been printed so far."""
        return "\n".join(Path(output).read_text() for output in self.case["outputs"] if Path(output).exists())

    def wait_for(self, pattern):
        """Wait until something is printed; return the match."""
        deadline = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self.text(), re.MULTILINE)):
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.02)
        return found

    def end(self):
        """Wait for the end of the case."""
        codes, ends = json.loads(self._process.stdout.readline())
        began = [float(when) for when in re.findall(r"^BEGAN \d+ ([\d.]+)$", self.text(), re.MULTILINE)]
        texts = [Path(output).read_text() for output in self.case["outputs"]]
        return Outcome(texts, codes, [end - max(began, default=end) for end in ends])

    def run(self, kind, **options):
        """Run a case to its end."""
        self.begin(kind, **options)
        return self.end()

    def ranks(self):
        """Processes that still live of those that this one has started."""
        import psutil

        return [child.pid for child in psutil.Process(self._process.pid).children(recursive=True)]

    def close(self):
        """End the process, and whatever it has started."""
        import psutil

        for child in psutil.Process(self._process.pid).children(recursive=True):
            child.kill()
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


def main():
    """Serve cases until standard input ends."""
    from torch.distributed.launcher import api  # noqa: F401

    import dualpipe_lab.world.torchrun  # noqa: F401
    from dualpipe_lab.world import operating_system, rank  # noqa: F401
    from torchrun_cases import kinds  # noqa: F401

    operating_system.adopt_orphans()  # ranks whose agent was killed: the test sees them
    for line in sys.stdin:
        case = json.loads(line)
        if case["job"] or case["kind"].endswith("parts"):
            importlib.import_module("dualpipe_lab.world.preload")
        if case["job"]:
            from torchrun_cases import trainings  # noqa: F401
        agents = [_fork(case, number) for number in range(len(case["hosts"]))]
        codes, ends = {}, {}
        deadline = time.monotonic() + case["patience"]
        while len(codes) < len(agents):
            ends |= dict.fromkeys(filter(_has_ranks, agents), time.time())
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in agents:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif not pid:
                time.sleep(0.01)
            if time.monotonic() > deadline:
                for agent in set(agents) - set(codes):
                    os.kill(agent, signal.SIGKILL)
        sys.stdout.write(
            json.dumps([[codes[agent] for agent in agents], [ends.get(agent, 0.0) for agent in agents]]) + "\n"
        )
        sys.stdout.flush()
        while True:  # orphans
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break


def _has_ranks(agent):
    """Whether an agent has a child that is more than a name: one that has ended waits for the agent to notice."""
    try:
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        states = [Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] for child in children]
    except OSError:
        return False
    return any(state not in "ZX" for state in states)


def _fork(case, number):
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        code = _serve(case, number)
    finally:
        sys.stderr.flush()
        os._exit(code)


def _serve(case, number):
    """Be the agent of one host."""
    output = os.open(case["outputs"][number], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if case["hosts"][number]:
        _enter(case["hosts"][number])
    if case["ahead"]:
        _set_clock(number * case["ahead"])
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from torchrun_cases import kinds

    config = LaunchConfig(
        case["least"], len(case["hosts"]), case["ranks_per_host"], run_id=case["run"], rdzv_backend="c10d",
        start_method="fork", rdzv_endpoint=f"{case['address']}:{case['port'] if case['hosts'][0] else 0}",
        max_restarts=case["restarts"], rdzv_configs={"is_host": number == 0} | case["rendezvous"],
        monitor_interval=0.1, local_addr=case["addresses"][number],
    )  # fmt: skip
    function, what = kinds.main, case["kind"]
    if case["job"]:
        from torchrun_cases import trainings

        function, what = trainings.main, case["job"]
        tempfile.tempdir = os.environ["TMPDIR"] = temporary_folder(tempfile.gettempdir(), case["hosts"][number])
        sys.stderr.write(f"AGENT {os.getpid()}\n")
        faulthandler.register(signal.SIGUSR2)  # where an agent waits that neither ends nor goes on
    try:
        elastic_launch(config, function)(what, case["timeout"])
    except ChildFailedError:
        return 1
    return 0


def temporary_folder(of_all, host):
    """The folder for temporary files of one host's trainings: hosts share the folder of checkpoints, and no more."""
    path = Path(of_all) / str(host)
    path.mkdir(exist_ok=True)
    return str(path)


def _enter(name):
    """Move this process into a network namespace."""
    import ctypes

    with open(f"/var/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")


def _set_clock(seconds):
    """Let the clocks of the processes that this one starts be ahead (Linux: a time namespace)."""
    import ctypes

    new_time = 0x80  # CLONE_NEWTIME of linux/sched.h
    if ctypes.CDLL(None, use_errno=True).unshare(new_time):
        raise OSError(ctypes.get_errno(), "no time namespaces here")
    Path("/proc/self/timens_offsets").write_text(f"monotonic {seconds} 0\nboottime {seconds} 0\n")


if __name__ == "__main__":
    main()
