"""The same script under `torchrun`: launch calls the function on this rank and gathers the values.

Also: restarts over the agent's store, and two hosts made of network namespaces.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dualpipe_lab.world.emulate import hosts

SCRIPT = """
import atexit
import sys
import torch

def end():  # called last: after what was registered later
    sys.stdout.write(f"GROUPS LEFT {torch.distributed.is_initialized()}\\n")

atexit.register(end)
import dualpipe_lab as lab

def fn(rank, world_size, factor):
    x = torch.full((4,), float(rank))
    lab.comm.all_reduce(x)
    return rank * factor, x[0].item()

out = lab.launch(fn, int(sys.argv[1]), 10)
again = lab.launch(fn, int(sys.argv[1]), 1)
counted = out.ledger.count("all_reduce"), out.ledger.sent("all_reduce", 0)
sys.stdout.write(f"RESULT {list(out)} {counted} {again[1][0]}\\n")  # one write: the ranks share the terminal
"""


def torchrun(tmp_path, *arguments, script=SCRIPT, options=(), **variables):
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    return subprocess.run(
        [*command, str(tmp_path / "script.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | variables,
    )


@pytest.mark.slow
def test_values_and_ledger_are_gathered_on_every_rank(tmp_path):
    done = torchrun(tmp_path, "2")
    assert done.stdout.count("RESULT [(0, 1.0), (10, 1.0)] (2, 16) 1") == 2, done.stderr
    assert done.stdout.count("GROUPS LEFT False") == 2  # a thread of GLOO that is left then may abort the process


@pytest.mark.slow
def test_a_world_of_another_size_is_an_error(tmp_path):
    assert "torchrun started 2 ranks, but the script launches 3" in torchrun(tmp_path, "3").stderr


def test_the_script_runs_unchanged_without_torchrun(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), "2"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.count("RESULT [(0, 1.0), (10, 1.0)] (2, 16) 1") == 1, done.stderr


# ---- the arguments of launch, and the world as it is

SETTINGS = """
import sys
import torch
import torch.distributed as dist
import dualpipe_lab as lab

def fn(rank, world_size):
    lab.comm.barrier()
    return world_size, torch.get_num_threads(), dist.get_debug_level().name

def mismatched(rank, world_size):
    lab.comm.all_reduce(torch.ones(4 + rank))

torch.set_num_threads(3)
told = {"threads": 2, "check": True, "output": "collect", "clock": "virtual", "start": "spawn"}
found = [*lab.launch(fn, None), *lab.launch(fn, 2, **told), *lab.launch(fn, None, link=lab.Link(gbps=1))]
sys.stdout.write(f"RESULT {found} {torch.get_num_threads()} {dist.get_debug_level().name}\\n")
lab.launch(mismatched, None, check=True)
"""


@pytest.mark.slow
def test_threads_and_check_are_honoured_and_the_others_are_told_once(tmp_path):
    done = torchrun(tmp_path, script=SETTINGS)
    plain, set_up = [(2, 1, "OFF")] * 2, [(2, 2, "DETAIL")] * 2
    assert done.stdout.count(f"RESULT {plain + set_up + plain} 3 OFF") == 2, done.stderr
    for ignored in ("output='collect'", "clock='virtual'", "start='spawn'", "link=Link(gbps=1, latency_ms=0.0)"):
        assert done.stderr.count(f"{ignored} is ignored") == 1, done.stderr
    assert "Detected mismatch between collectives" in done.stderr
    assert done.returncode != 0


BACK_ENDS = """
import sys
import torch
import dualpipe_lab as lab

def fn(rank, world_size):
    x = torch.full((4,), float(rank)).to(lab.device())
    lab.comm.all_reduce(x)
    return str(lab.device()), x[0].item()

found = [list(lab.launch(fn, None, backend=name)) for name in ("gloo", "nccl", "gloo")]
sys.stdout.write(f"RESULT {found}\\n")
"""


@pytest.mark.slow
def test_a_launch_with_another_back_end_joins_again(tmp_path):
    """On the stand-in for NCCL; the device is that of the local rank, and the first back end returns."""
    path = os.pathsep.join(map(str, [Path(__file__).parents[1], *sys.path]))
    done = torchrun(tmp_path, script=BACK_ENDS, DUALPIPE_LAB_ACCELERATOR="stand_in", PYTHONPATH=path)
    cpu, cuda = [("cpu", 1.0)] * 2, [("cuda:0", 1.0), ("cuda:1", 1.0)]
    assert done.stdout.count(f"RESULT {[cpu, cuda, cpu]}") == 2, done.stderr


# ---- restarts, and several nodes

DIES_ONCE = """
import os, signal, sys
import torch
import dualpipe_lab as lab

def fn(rank, world_size):
    for step in range(20):
        x = torch.full((4,), float(rank))
        lab.comm.all_reduce(x)
        if step == 10 and rank == 1 and lab.cluster().restart == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return x[0].item()

out = lab.launch(fn, None)
again = lab.launch(fn, None)
sys.stdout.write(f"RESULT {list(out)} {list(again)} {lab.cluster().restart}\\n")
"""


@pytest.mark.slow
def test_a_restart_joins_through_the_store_that_the_dead_have_used(tmp_path):
    """With torch's own rendezvous the second start fails: it connects to the addresses of the first."""
    done = torchrun(tmp_path, script=DIES_ONCE, options=("--max-restarts", "1"))
    assert done.stdout.count("RESULT [1.0, 1.0] [1.0, 1.0] 1") == 2, done.stderr
    assert "connectFullMesh failed" not in done.stderr
    assert done.returncode == 0


NODES = """
import os, sys
import torch
import dualpipe_lab as lab

def fn(rank, world_size):
    x = torch.full((4,), float(rank))
    lab.comm.all_reduce(x)
    return x[0].item(), os.environ["GLOO_SOCKET_IFNAME"], lab.cluster().node

sys.stdout.write(f"RESULT {list(lab.launch(fn, None))}\\n")
"""


def start_nodes(nodes, script, **variables):
    """Run torchrun on every host, as the page on GPUs has it, and return what each has printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--master-addr", nodes[0].address, "--master-port", "29500"]
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"} | variables
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    running = [
        host.start([*command, "--node-rank", str(node), str(script)], **pipes) for node, host in enumerate(nodes)
    ]
    try:
        return [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_two_hosts_need_no_variable_for_gloo_and_a_wrong_one_is_refused(tmp_path, two_hosts):
    (tmp_path / "script.py").write_text(NODES)
    said = start_nodes(two_hosts, tmp_path / "script.py")
    refused = start_nodes(two_hosts, tmp_path / "script.py", GLOO_SOCKET_IFNAME="lo")
    values = [(6.0, hosts.INTERFACE, node) for node in (0, 0, 1, 1)]
    assert [out.count(f"RESULT {values}") for out, _ in said] == [2, 2], said
    for host, (_, error) in zip(two_hosts, refused, strict=True):
        assert f"reaches no other of the 2 nodes; set one of {hosts.INTERFACE} ({host.address})" in error
