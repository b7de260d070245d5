"""Hosts on this machine: a torchrun with its ranks is a host; a kill leaves nothing."""

import re
from pathlib import Path

import pytest

import dualpipe_lab as lab
from dualpipe_lab.launch.cluster.emulated_hosts import MARK

SCRIPT = """
import os, sys, time
import dualpipe_lab as lab

def place(rank, world_size):
    started = lab.cluster()
    return rank, world_size, started.node, started.num_nodes, started.ranks_per_node

values = list(lab.launch(place, None))
if lab.cluster().rank == 0:
    print("PLACES", values, "RESTART", lab.cluster().restart, flush=True)
def stay(rank, world_size):
    time.sleep(300 * (rank == world_size - 1))
    lab.comm.barrier()

if sys.argv[1] == "stay" and lab.cluster().restart == 0:
    lab.launch(stay, None, timeout=400)
"""


@pytest.fixture(scope="module")
def hosts():
    with lab.emulated_hosts(2) as made:
        (made.folder / "script.py").write_text(SCRIPT)
        yield made


def processes(hosts):
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found += [path.parent.name] if f"{MARK}={hosts._mark}".encode() in path.read_bytes() else []
        except OSError:
            continue
    return found


def test_a_host_is_lost_and_the_other_goes_on(hosts):
    hosts.start(hosts.folder / "script.py", "stay", min_hosts=1, max_restarts=1, ranks_per_host=1)
    assert hosts.wait_for("PLACES").startswith("PLACES [(0, 2, 0, 2, 1), (1, 2, 1, 2, 1)]")
    with pytest.raises(RuntimeError, match=r"one job at a time; call end\(\)"):
        hosts.start(hosts.folder / "script.py", "leave")
    with pytest.raises(TimeoutError, match=r"0.1 s passed, and no host has printed 'nothing'; printed was:\nPLACES"):
        hosts.wait_for("nothing", seconds=0.1)
    hosts.kill(1)
    assert hosts.wait_for("PLACES .* RESTART 1") == "PLACES [(0, 1, 0, 1, 1)] RESTART 1"
    run = hosts.end()
    assert run.codes == [0, -9], run.outputs
    assert processes(hosts) == []


def test_what_takes_too_long_is_killed(hosts):
    hosts.start(hosts.folder / "script.py", "stay", ranks_per_host=1)
    with pytest.raises(TimeoutError, match=r"the job ran longer than 0\.1 s"):
        hosts.end(seconds=0.1)
    assert processes(hosts) == []


def test_what_no_host_can_do_is_refused(tmp_path):
    with pytest.raises(ValueError, match="makes hosts from 1, got num_hosts=0"), lab.emulated_hosts(0):
        pass
    with lab.emulated_hosts(2) as hosts:
        folder = hosts.folder
        (folder / "script.py").write_text("")
        with pytest.raises(FileNotFoundError, match=re.escape(f"there is no {tmp_path / 'other.py'}")):
            hosts.start(tmp_path / "other.py")
        with pytest.raises(ValueError, match="min_hosts is from 1 to the 2 hosts of the job, got 3"):
            hosts.start(folder / "script.py", min_hosts=3)
    assert not folder.exists()
