"""`launch` in workers: processes that were forked from one that has launched, spawned ones, and daemonic ones."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dualpipe_lab.launch import operating_system

WORKERS = """
import concurrent.futures, multiprocessing, os, sys
import torch
import dualpipe_lab as lab
from dualpipe_lab import comm

def total(rank, world_size):
    x = torch.ones(1) * (rank + 1)
    comm.all_reduce(x)
    return float(x), os.getpid()

def go():
    values = list(lab.launch(total, 2, timeout=60))
    assert [value for value, _ in values] == [3.0, 3.0]
    return {pid for _, pid in values}

def restarted():
    lab.restart_fork_server()
    go()

def refused():
    try:
        go()
    except RuntimeError as error:
        sys.exit("daemonic process" not in str(error))
    sys.exit(2)

if __name__ == "__main__":
    before, kinds = go(), sys.argv[1:]
    workers = {"restart": ("fork", restarted, False), "daemon": ("fork", refused, True)}
    workers["forkserver"] = ("forkserver", go, False)
    for kind in workers.keys() & kinds:
        method, target, daemon = workers[kind]
        worker = multiprocessing.get_context(method).Process(target=target, daemon=daemon)
        worker.start()
        worker.join(120)
        assert worker.exitcode == 0, (kind, worker.exitcode)
    for method in {"executor, fork", "executor, spawn"} & {*kinds}:
        context = multiprocessing.get_context(method.removeprefix("executor, "))
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
            assert not executor.submit(go).result(120) & before, "ranks of the parent's"
    if "os.fork" in kinds:
        if not (pid := os.fork()):
            go()
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    after = go()
    assert not after & before
    print("done")
"""


@pytest.mark.skipif(operating_system.NAME != "linux", reason="processes are counted by their environment")
@pytest.mark.parametrize(
    ("start", "kinds"),
    [
        ("forkserver", ["restart", "daemon", "forkserver", "executor, fork", "executor, spawn"]),
        ("spawn", ["os.fork"]),
    ],
)
def test_a_worker_launches_ends_and_leaves_no_process(start, kinds, tmp_path):
    script, mark = tmp_path / "workers.py", f"MARK_OF_WORKERS={tmp_path}"
    script.write_text(WORKERS)
    environment = (
        os.environ
        | dict([mark.split("=", 1)])
        | {
            "DUALPIPE_LAB_START": start,
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
    )
    command = [sys.executable, "-W", "error::UserWarning", str(script), *kinds]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.stdout == "done\n", done.stderr
    deadline = time.monotonic() + 30
    while (left := operating_system.processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
