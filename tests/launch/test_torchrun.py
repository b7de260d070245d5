"""The same script under `torchrun`: launch calls the function on this rank and gathers the values.

Also: what the ranks of a deadlock print at the time limit.  Restarts are in `test_emulated_hosts.py`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dualpipe_lab.launch.cluster.environment import Environment
from dualpipe_lab.launch.torchrun import check_world

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

def place(rank, world_size):
    x = torch.full((4,), float(rank)).to(lab.device())
    lab.comm.all_reduce(x)
    return str(lab.device()), x[0].item()

out = lab.launch(fn, int(sys.argv[1]), 10)
again = lab.launch(fn, int(sys.argv[1]), 1)
places = [list(lab.launch(place, None, backend=name)) for name in sys.argv[2:]]
counted = out.ledger.count("all_reduce"), out.ledger.sent("all_reduce", 0)
sys.stdout.write(f"RESULT {list(out)} {counted} {again[1][0]} {places}\\n")  # one write: the ranks share the terminal
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


def test_values_and_ledger_are_gathered_on_every_rank_and_another_back_end_joins_again(tmp_path):
    """NCCL is its stand-in; the device is that of the local rank, and the first back end returns."""
    path = os.pathsep.join(map(str, [Path(__file__).parents[1], *sys.path]))
    done = torchrun(tmp_path, "2", "gloo", "nccl", "gloo", DUALPIPE_LAB_ACCELERATOR="stand_in", PYTHONPATH=path)
    cpu, cuda = [("cpu", 1.0)] * 2, [("cuda:0", 1.0), ("cuda:1", 1.0)]
    assert done.stdout.count(f"RESULT [(0, 1.0), (10, 1.0)] (2, 16) 1 {[cpu, cuda, cpu]}") == 2, done.stderr
    assert done.stdout.count("GROUPS LEFT False") == 2  # a thread of GLOO that is left then may abort the process


def test_a_world_of_another_size_is_an_error():
    started = Environment(0, 2, 0, 2, 0, 1, "127.0.0.1", 29500, starter="torchrun")
    assert check_world(started, None) == check_world(started, 2) == 2
    with pytest.raises(ValueError, match="torchrun started 2 ranks, but the script launches 3; pass world_size=2"):
        check_world(started, 3)


# ---- the arguments of launch, and the world as it is

SETTINGS = """
import sys
import torch
import torch.distributed as dist
import dualpipe_lab as lab

def fn(rank, world_size):
    lab.comm.barrier()
    return world_size, torch.get_num_threads(), dist.get_debug_level().name

def scattered(rank, world_size):
    lab.comm.reduce_scatter_single(torch.empty(2**18), torch.ones(2**19))

def mismatched(rank, world_size):
    lab.comm.all_reduce(torch.ones(4 + rank))

torch.set_num_threads(3)
told = {"threads": 2, "check": True, "output": "collect", "clock": "virtual", "start": "spawn"}
found = [*lab.launch(fn, None), *lab.launch(fn, 2, **told), *lab.launch(fn, None, link=lab.Link(gbps=1))]
ledger = lab.launch(scattered, None, wire=True).ledger
sys.stdout.write(f"WIRE {[ledger.on_the_wire('reduce_scatter_single', rank) for rank in range(2)]}\\n")
sys.stdout.write(f"RESULT {found} {torch.get_num_threads()} {dist.get_debug_level().name}\\n")
lab.launch(mismatched, None, check=True)
"""


def test_threads_and_check_are_honoured_and_the_others_are_told_once(tmp_path):
    done = torchrun(tmp_path, script=SETTINGS)
    plain, set_up = [(2, 1, "OFF")] * 2, [(2, 2, "DETAIL")] * 2
    assert done.stdout.count(f"RESULT {plain + set_up + plain} 3 OFF") == 2, done.stderr
    for ignored in ("output='collect'", "clock='virtual'", "start='spawn'", "link=Link(gbps=1, latency_ms=0.0)"):
        assert done.stderr.count(f"{ignored} is ignored") == 1, done.stderr
    if sys.platform == "linux":  # elsewhere the sockets cannot be read
        assert done.stdout.count("WIRE [0.5, 0.5]") == 2, done.stdout
    assert "Detected mismatch between collectives" in done.stderr
    assert done.returncode != 0


# ---- time limits

DEADLOCK = """
import torch
import dualpipe_lab as lab
from dualpipe_lab import comm

def fn(rank, world_size):
    pair = comm.new_group([0, 1])
    if rank < 2:
        comm.all_reduce(torch.ones(4), group=pair)
    if rank == 0:
        comm.all_reduce(torch.ones(4), group=pair)
    elif rank == 1:
        comm.recv(torch.ones(2), 0, tag=9, group=pair)

lab.launch(fn, None, timeout=3)
"""


def test_a_deadlock_ends_at_the_time_limit_with_the_last_operation_of_each_rank(tmp_path):
    """Also in a group that the script makes, whose own limit in torch is half an hour."""
    done = torchrun(tmp_path, script=DEADLOCK, options=("--nproc-per-node", "3", "--monitor-interval", "2"))
    assert done.returncode == 1
    said = dict(re.findall(r"rank (\d): last operation: (.*)$", done.stderr, re.MULTILINE))
    waited = r", waited \d\.\d s and did not end"
    assert re.fullmatch(rf"all_reduce shape \(4,\) float32, number 1 of ranks 0, 1{waited}", said["0"]), done.stderr
    assert re.fullmatch(rf"recv from rank 0 tag 9 shape \(2,\) float32{waited}", said["1"]), done.stderr
    assert re.fullmatch(
        rf"exchange of results \(the function has returned\), number 0 of ranks 0, 1, 2{waited}", said["2"]
    ), done.stderr
    assert "Timed out waiting 3000ms" in done.stderr
