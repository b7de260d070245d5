"""A real kernel: cells are named, interrupts stop the ranks, a killed kernel takes them along, the import warms up."""

import os
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from dualpipe_lab.launch.folder import PREFIX, sweep

SLEEPERS = """
import os, time
def sleepers(rank, world_size):
    open(f"{path}/pid-{rank}", "w").write(str(os.getpid()))
    time.sleep(60)
lab.launch(sleepers, 3, timeout=100)
"""


def pids(folder, count=3, seconds=120):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = [path.read_text() for path in folder.glob("pid-*")]
        if len(found) == count and all(found):
            return [int(text) for text in found]
        time.sleep(0.05)
    raise TimeoutError("the ranks did not start")


def wait_for_end(numbers, seconds=60.0):  # usually at once
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        alive = [n for n in numbers if psutil.pid_exists(n) and psutil.Process(n).status() != psutil.STATUS_ZOMBIE]
        if not alive:
            return []
        time.sleep(0.05)
    return alive


def test_a_cell_runs_on_ranks_and_its_errors_name_the_cell_and_line(kernel):
    assert kernel.run("import dualpipe_lab as lab, sys") == ("", "", "")
    warm = (
        "from multiprocessing import forkserver\n('torch' in sys.modules, forkserver._forkserver._forkserver_pid > 0)"
    )
    assert kernel.run(warm)[0] == "(False, True)"
    text, _, _ = kernel.run(
        "offset = 5\n"
        "def hello(rank, world_size):\n"
        "    print('rank', rank)\n"
        "    return rank + offset\n"
        "lab.launch(hello, 2)"
    )
    assert text == "rank 0\nrank 1\n[5, 6]"
    _, name, message = kernel.run(
        "def broken(rank, world_size):\n    if rank == 1:\n        raise ValueError('bad shape')\nlab.launch(broken, 2)"
    )
    assert name == "RankError"
    assert "rank 1 of 2 raised ValueError: bad shape" in message
    assert "at Cell In[4], line 3, in broken:  raise ValueError('bad shape')" in message


IMPORTED = "lab.launch(lambda rank, world_size: __import__('sys').modules.get('torch._dynamo') is not None, 1)"


def test_the_first_launch_does_not_wait_for_what_the_first_optimizer_step_needs(kernel):
    kernel.run("import dualpipe_lab as lab")
    assert kernel.run(IMPORTED)[0] == "[False]"
    deadline = time.monotonic() + 120  # a second later, and the import's own seconds
    while (text := kernel.run(IMPORTED)[0]) != "[True]":
        assert (text, time.monotonic() < deadline) == ("[False]", True)
        time.sleep(0.5)


@pytest.mark.parametrize("watched", [True, False])
def test_a_first_launch_says_what_it_waits_for_where_somebody_reads_along(kernel, watched):
    kernel.run("import dualpipe_lab as lab, sys\nsys.modules['dualpipe_lab.launch.server'].SILENCE_SECONDS = 0")
    text, _, _ = kernel.finish(kernel.start("lab.launch(lambda rank, world_size: rank, 2)", watched))
    assert text == "starting the server of ranks, once per kernel\n" * watched + "[0, 1]"


def test_an_interrupt_stops_all_ranks_and_the_next_cell_works_and_a_killed_kernel_takes_its_ranks_along(
    kernel, tmp_path
):
    kernel.run(f"import dualpipe_lab as lab\npath = {str(tmp_path)!r}")
    request = kernel.start(SLEEPERS)
    numbers = pids(tmp_path)
    started = time.monotonic()
    kernel.manager.interrupt_kernel()
    _, name, message = kernel.finish(request)
    assert name == "KeyboardInterrupt"
    assert message.startswith("interrupted. Where each rank was:\n  rank 0: ")
    assert "line 4, in sleepers" in message
    assert kernel.shown == f"KeyboardInterrupt: {message}"  # and no lines of what waited for the ranks
    assert time.monotonic() - started < 30  # the ranks would sleep for a minute
    assert wait_for_end(numbers) == []
    assert kernel.run("lab.launch(lambda rank, world_size: rank, 2)")[0] == "[0, 1]"
    for path in tmp_path.iterdir():
        path.unlink()
    kernel.start(SLEEPERS)
    numbers, owner = pids(tmp_path), kernel.pid
    (folder,) = Path(tempfile.gettempdir()).glob(f"{PREFIX}{owner}-*")
    os.kill(owner, signal.SIGKILL)
    assert wait_for_end(numbers) == []
    psutil.Process(owner).wait() if psutil.pid_exists(owner) else None
    assert folder in sweep()


def test_an_interrupt_during_the_warm_up_does_no_harm(kernel):
    kernel.run("import dualpipe_lab as lab")
    kernel.manager.interrupt_kernel()
    time.sleep(0.1)
    text = ""
    for _ in range(3):  # the interrupt itself may arrive in the next cell
        text, name, _ = kernel.run("lab.launch(lambda rank, world_size: rank, 2)")
        if not name:
            break
    assert text == "[0, 1]"


def test_a_rank_that_holds_the_interpreter_dies_with_the_kernel_too(kernel, tmp_path):
    kernel.run(f"import dualpipe_lab as lab\npath = {str(tmp_path)!r}")
    kernel.start(SLEEPERS.replace("time.sleep(60)", "import ctypes; ctypes.PyDLL(None).sleep(60)"))
    numbers = pids(tmp_path)
    os.kill(kernel.pid, signal.SIGKILL)
    assert wait_for_end(numbers) == []
