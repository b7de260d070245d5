"""Forked kernels: each is born as an ordinary one, shares nothing with its neighbours, and ends as it is told."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from glob import glob
from pathlib import Path

import psutil
import pytest
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory

from dualpipe_course.grading import replay
from dualpipe_course.kernels import fork_server, provisioner

ROOT = Path(__file__).parents[1]
PATIENCE = 120  # seconds; a busy machine
VARIABLE = "JUPYTER_DEFAULT_PROVISIONER_NAME"
BIRTH = """
import json, os, resource, signal, sys, tempfile, threading, warnings, math
print(json.dumps({
    "arguments": [each for each in sys.argv if not each.endswith(".json")],
    "path": sys.path, "flags": repr(sys.flags), "bytecode": sys.dont_write_bytecode,
    "course": [name for name in sys.modules if name.startswith("dualpipe")],
    "environment": {name: value for name, value in os.environ.items() if name != "JPY_PARENT_PID"},
    "folders": [os.getcwd(), tempfile.gettempdir()],
    "signals": {number: str(signal.getsignal(number)) for number in range(1, 32)},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "leads": os.getpid() == os.getpgrp() == os.getsid(0), "parent": str(os.getppid()) == os.environ["JPY_PARENT_PID"],
    "threads": sorted(type(each).__name__ for each in threading.enumerate()),
    "limits": [resource.getrlimit(number) for number in range(10)], "mask": os.umask(0o22),
    "planted": [hasattr(math, "planted"), os.path.exists("/proc/self/fd/200")],
}))
"""
PLANT = """
math.planted = 1
os.environ["PLANTED"] = "1"
os.dup2(1, 200)
os.umask(0)
sys.path.append("planted"), sys.argv.append("planted")
signal.signal(signal.SIGUSR1, lambda *_: None)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.chdir("/")
"""
DRAW = """
import random, numpy, torch
print(random.random(), numpy.random.rand(), torch.rand(1).item())
"""
RANKS = """
import dualpipe_lab as lab
from dualpipe_lab.launch import server
import psutil
def ranks():
    def parent(rank, world_size):
        import os
        print("from", rank)
        return os.getppid()
    return lab.launch(parent, 2)
first, second = ranks(), ranks()
server.restart_fork_server()
third = ranks()
print([len({*first, *second, *third}), psutil.Process(third[0]).ppid() == os.getpid()])
"""


class Kernel:
    """A kernel, and what its cells print."""

    def __init__(self, **options):
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(**options)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)

    @property
    def process(self):
        return self.manager.provisioner.process

    @property
    def is_forked(self):
        return isinstance(self.process, provisioner.ForkedKernel)

    def run(self, code):
        said = []
        self.client.execute_interactive(code, timeout=PATIENCE, output_hook=lambda each: said.append(each["content"]))
        assert not [each for each in said if "ename" in each], said
        return "".join(each["text"] for each in said if "text" in each)

    def stop(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def ended(kernel):
    """Wait until the manager sees that a kernel is dead; return its status."""
    wait_until(lambda: not kernel.manager.is_alive())
    return kernel.process.poll()


def wait_until(holds):
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def start(monkeypatch):
    """Start kernels, forked ones unless another way is named."""
    with ExitStack() as stack:

        def one(way="forked", **options):
            monkeypatch.setattr(KernelProvisionerFactory.instance(), "default_provisioner_name", way)
            kernel = Kernel(**options)
            stack.callback(kernel.stop)
            return kernel

        yield one


def test_a_kernel_is_born_as_an_ordinary_one_and_shares_nothing(start, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "notebooks").mkdir()
    options = {"cwd": str(tmp_path / "notebooks"), "env": os.environ | {"OWN": "1"}}
    ordinary, one = start("local-provisioner", **options), start(**options)
    assert (ordinary.is_forked, one.is_forked) == (False, True)
    born = json.loads(ordinary.run(BIRTH))
    assert born["course"] == []
    assert born["folders"] == [str(tmp_path / "notebooks"), str(tmp_path)]
    assert json.loads(one.run(BIRTH)) == born
    one.run(PLANT)
    another = start(**options)
    assert json.loads(another.run(BIRTH)) == born
    draws = [kernel.run(DRAW).split() for kernel in (one, another)]
    assert not set(draws[0]) & set(draws[1])


def test_a_kernel_needs_no_port_that_another_process_could_take(start):
    kernel = start()
    sockets = f"{kernel.manager.ip}-*"
    assert len(glob(sockets)) == len(kernel.manager.ports) == 5  # what remains is one that the system chooses
    kernel.stop()
    assert not glob(sockets)


def test_a_figure_is_shown_as_by_an_ordinary_kernel(start):
    figure = "import matplotlib.pyplot as plt, sys\nsys.displayhook = print\nplt.plot([1, 2])\nprint(plt.get_backend())"
    shown = []
    for way in ("local-provisioner", "forked"):
        found = []
        kernel = start(way)
        kernel.client.execute_interactive(figure, timeout=PATIENCE, output_hook=found.append)
        shown.append([{**each["content"], "transient": ""} for each in found if each["msg_type"] == "display_data"])
    assert "image/png" in shown[0][0]["data"]
    assert shown[0] == shown[1]


def test_a_kernel_launches_ranks_from_a_fork_server_that_was_forked_with_it(start):
    kernel = start()
    said = kernel.run("import os\n" + RANKS)
    assert said.count("from 0\n") == said.count("from 1\n") == 3
    assert said.endswith("[2, True]\n")  # one server for two launches, another after the reset
    servers = [each for each in psutil.Process(kernel.process.pid).children() if "forkserver" in str(each.cmdline())]
    assert len(servers) == 1  # the second one; else `multiprocessing` no longer calls `spawnv_passfds` for the first
    wait_until(lambda: len(psutil.Process(kernel.process.pid).children()) == 2)  # and the tracker of resources


def test_one_that_dies_leaves_the_others_and_is_reported(start):
    killed, gone, stays = start(), start(), start()
    os.kill(killed.process.pid, signal.SIGKILL)
    gone.client.execute("import os; os._exit(3)")
    assert (ended(killed), ended(gone)) == (-signal.SIGKILL, 3)
    assert stays.run("print(6 * 7)") == "42\n"
    killed.manager.restart_kernel(now=True)
    killed.client.wait_for_ready(timeout=PATIENCE)
    assert killed.is_forked
    stays.manager.signal_kernel(signal.SIGTERM)
    assert ended(stays) == -signal.SIGTERM
    killed.manager.shutdown_kernel()
    assert not killed.manager.has_kernel


def test_an_interrupt_stops_a_cell_and_nothing_else(start):
    kernel = start()
    waiting = psutil.Process(kernel.process.pid).children()
    request = kernel.client.execute("print('on', flush=True)\nimport time\ntime.sleep(1000)")
    while kernel.client.get_iopub_msg(timeout=PATIENCE)["content"].get("text") != "on\n":
        pass
    kernel.manager.interrupt_kernel()
    reply = kernel.client.get_shell_msg(timeout=PATIENCE)
    assert (reply["parent_header"]["msg_id"], reply["content"]["ename"]) == (request, "KeyboardInterrupt")
    assert waiting == psutil.Process(kernel.process.pid).children()  # what becomes the fork server of ranks
    assert kernel.run("print(6 * 7)") == "42\n"


PROGRAM = """
import multiprocessing, os, sys
from dualpipe_course.kernels import provisioner
from jupyter_client.manager import start_new_kernel

def read(may_end):
    manager, client = start_new_kernel(kernel_name="python3")
    launch = "import dualpipe_lab as lab; lab.launch(lambda rank, world_size: None, 2);"
    client.execute_interactive(launch, timeout=120)
    os.write(1, f"{manager.provisioner.pid}\\n".encode())  # in one write: two processes print here
    may_end.wait()

provisioner.start_server(provisioner.settings(dict(os.environ)))
context = multiprocessing.get_context("fork")
may_end = context.Event()
readers = [context.Process(target=read, args=[may_end]) for _ in range(2)]
for each in readers: each.start()
sys.stdin.readline()
may_end.set()
for each in readers: each.join()
"""


@pytest.mark.parametrize("is_killed", [True, pytest.param(False, marks=pytest.mark.every)])
def test_processes_share_a_fork_server_and_nothing_is_left_of_them(is_killed):
    command, environment = [sys.executable, "-c", PROGRAM], os.environ | {VARIABLE: "forked"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as program:
        kernels = [psutil.Process(int(program.stdout.readline())) for _ in range(2)]
        (server,) = {each.parent() for each in kernels}
        assert server.ppid() == program.pid
        left = [server, *server.children(recursive=True)]
        assert len(left) >= 1 + 2 * 3  # kernels, their fork servers, trackers of resources
        if is_killed:
            for each in [*psutil.Process(program.pid).children(), program]:
                if each != server:
                    each.kill()
        else:
            program.communicate("\n")
    assert (program.returncode == 0) != is_killed
    _, alive = psutil.wait_procs(left, timeout=PATIENCE)
    assert alive == []


def test_an_ordinary_kernel_starts_where_a_fork_would_be_another_or_no_server_starts(start, monkeypatch):
    assert not start(stdout=subprocess.PIPE).is_forked
    with monkeypatch.context() as patched:
        patched.delattr(os, "pidfd_open")
        patched.setenv("TZ", "UTC6")  # no server of these settings runs already
        assert not start().is_forked
    monkeypatch.setattr(fork_server, "__file__", str(ROOT / "no-such-script.py"))
    monkeypatch.setenv("TZ", "UTC7")
    kernel = start()
    assert not kernel.is_forked
    assert kernel.run("print(6 * 7)") == "42\n"


def test_a_kernel_has_the_settings_that_python_reads_at_its_start(start):
    with open(os.devnull, "w") as nothing:
        settings = {"PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}
        kernel = start(env=os.environ | settings, stdout=nothing, stderr=nothing)
    assert kernel.is_forked
    assert kernel.run("import sys, torch; print(sys.flags.utf8_mode, torch.get_num_threads())") == "1 1\n"


def test_the_book_and_the_replay_fork_and_learners_and_graders_do_not(monkeypatch, tmp_path):
    def commands(*goal):
        made = subprocess.run(["make", "-n", *goal], cwd=ROOT, capture_output=True, text=True, check=True)
        return [line for line in made.stdout.splitlines() if f"{VARIABLE}=forked" in line]

    assert len(commands("book")) == 1
    (line,) = commands("test")
    assert "--nbval" in line
    assert commands("lab") == commands("grade", "SUBMISSIONS=x", "NBVAL=1") == commands("exercises") == []
    monkeypatch.setenv(VARIABLE, "forked")
    assert replay._environment(dict.fromkeys(("work", "home", "tmp"), tmp_path))[VARIABLE] == "local-provisioner"
