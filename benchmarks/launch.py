"""How long a learner waits for ranks: launch against torch.multiprocessing.spawn, from a real notebook kernel.

Each round runs every contender once, one after another, so that both meet the same load; medians over the rounds.
Both start the ranks, join them over GLOO, all-reduce one tensor and return when every rank has ended.
With `--before FOLDER`, another checkout, the contenders are the `launch` of both checkouts, each in its own kernels.

    python benchmarks/launch.py [--rounds 5] [--ranks 2 4 8] [--before FOLDER]
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from jupyter_client.manager import KernelManager
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parents[1]
MODULE = """
import torch
import torch.distributed as dist

def spawned(rank, world_size, folder):
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
"""

SETUP = """
import json, os, shutil, sys, tempfile, time
sys.path[:0] = {folders!r}
began = time.perf_counter()
import dualpipe_lab as lab
imported = time.perf_counter() - began
began = time.perf_counter()
import torch
from torch import nn
import numpy, matplotlib.pyplot
learners_imports = time.perf_counter() - began

def launched(rank, world_size):
    x = torch.ones(4)
    lab.comm.all_reduce(x)

def failing(rank, world_size):
    if rank == 1:
        raise ValueError("bad shape")
    lab.comm.all_reduce(torch.ones(4))

def stuck(rank, world_size):
    lab.comm.recv(torch.ones(4), (rank - 1) % world_size)

def seconds(call):
    began = time.perf_counter()
    try:
        call()
    except (lab.RankError, lab.RankTimeout):
        pass
    return time.perf_counter() - began

def spawn(ranks):
    import spawned
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    folder = tempfile.mkdtemp()
    torch.multiprocessing.spawn(spawned.spawned, args=(ranks, folder), nprocs=ranks)
    shutil.rmtree(folder)

first = seconds(lambda: lab.launch(launched, 2))
print(json.dumps([imported, learners_imports, first]))
"""


class Kernel:
    """A notebook kernel that runs one cell at a time and returns what it printed."""

    def __init__(self) -> None:
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel()
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)

    def run(self, code: str) -> list[float]:
        """Run a cell that prints a JSON list of numbers, and return it."""
        printed: list[str] = []

        def keep(message: dict) -> None:
            if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
                printed.append(message["content"]["text"])
            if message["msg_type"] == "error":
                raise RuntimeError("\n".join(message["content"]["traceback"]))

        self._client.execute_interactive(code, timeout=300, output_hook=keep)
        return json.loads("".join(printed))

    def stop(self) -> None:
        """End the kernel."""
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


def measure(rounds: int, ranks: list[int]) -> tuple[list[float], dict[tuple[str, int], list[float]]]:
    """Seconds of the first launch, and of every contender in every round."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "spawned.py").write_text(MODULE)
        kernel = Kernel()
        try:
            first = kernel.run(SETUP.format(folders=[str(HERE), folder]))
            calls = {
                "launch": "lab.launch(launched, {})",
                "spawn": "spawn({})",
                "rank error": "lab.launch(failing, {})",
                "deadlock": "lab.launch(stuck, {})",
            }
            times: dict[tuple[str, int], list[float]] = {(name, n): [] for name in calls for n in ranks}
            for _ in range(rounds):
                for name, n in times:
                    call = calls[name].format(n)
                    times[name, n] += kernel.run(f"print(json.dumps([seconds(lambda: {call})]))")
        finally:
            kernel.stop()
    return first, times


def compare(before: Path, rounds: int, ranks: list[int]) -> dict[tuple[str, str], list[float]]:
    """Seconds of import, first launch and later launches of two checkouts; each round gives both a fresh kernel."""
    times: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds):
        checkouts = [("before", before.resolve()), ("now", HERE)]
        for name, root in checkouts[:: -1 if number % 2 else 1]:  # who comes first finds the other's files in memory
            kernel = Kernel()
            try:
                imported, _, first = kernel.run(SETUP.format(folders=[str(root)]))
                found = {"import dualpipe_lab": imported, "first launch, 2 ranks": first}
                for n in ranks:
                    code = f"print(json.dumps([seconds(lambda: lab.launch(launched, {n})) for _ in range(3)]))"
                    found[f"{n} ranks"] = statistics.median(kernel.run(code))
            finally:
                kernel.stop()
            for row, value in found.items():
                times.setdefault((row, name), []).append(value)
    return times


def report_comparison(times: dict[tuple[str, str], list[float]], rounds: int) -> None:
    """Print one row per quantity, one column per checkout."""
    table = Table(title=f"seconds: median (least to most) of {rounds} rounds; a launch is the median of 3")
    for column in ("", "before", "now"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in dict.fromkeys(row for row, _ in times):
        table.add_row(row, _spread(times[row, "before"]), _spread(times[row, "now"]))
    Console().print(table)


def report(first: list[float], times: dict[tuple[str, int], list[float]], rounds: int) -> None:
    """Print the tables."""
    console = Console()
    imported, learners, launch = first
    console.print(
        f"import dualpipe_lab {imported * 1e3:.0f} ms, the learner's own imports (torch, numpy, matplotlib) "
        f"{learners:.1f} s, then the first launch of 2 ranks {launch:.2f} s"
    )
    table = Table(title=f"seconds from call to return, in a kernel: median (least to most) of {rounds} rounds")
    for column in ("ranks", "launch", "torch.multiprocessing.spawn", "ratio", "rank error shown", "deadlock explained"):
        table.add_column(column, justify="right")
    for n in sorted({n for _, n in times}):
        cells = {name: values for (name, count), values in times.items() if count == n}
        ratio = statistics.median(cells["spawn"]) / statistics.median(cells["launch"])
        shown = [_spread(cells[name]) for name in ("launch", "spawn", "rank error", "deadlock")]
        table.add_row(str(n), shown[0], shown[1], f"{ratio:.0f}x", shown[2], shown[3])
    console.print(table)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="another checkout, to compare its launch")
    arguments = parser.parse_args()
    if arguments.before:
        report_comparison(compare(arguments.before, arguments.rounds, arguments.ranks), arguments.rounds)
    else:
        report(*measure(arguments.rounds, arguments.ranks), arguments.rounds)
