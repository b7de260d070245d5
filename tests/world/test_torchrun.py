"""The same script under `torchrun`: launch calls the function on this rank and gathers the values."""

import subprocess
import sys

import pytest

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


def torchrun(tmp_path, *arguments):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, str(tmp_path / "script.py"), *arguments], capture_output=True, text=True, timeout=120, check=False
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
