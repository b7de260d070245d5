"""Conversions of a model between the forms of its weights: sizes, times, and the memory that each needs.

Every conversion runs in a process of its own.  Memory is what the process holds itself (RssAnon; pages of mapped
files do not count) above what it held after its imports, read every 2 ms.  The bound is the largest tensor as it is
read, once more as it is written, and 16 MB for headers and buffers.  The last row's folder equals the first to the bit.

    python benchmarks/weights.py [--layers 8] [--hidden 1024] [--vocabulary 32000]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from dualpipe_lab import models, train
from dualpipe_lab.dp import checkpoint

SLACK = 16 * 10**6
STEPS = (
    ("published", "checkpoint", "ours"),
    ("ours", "published", "back"),
    ("ours", "torch", "theirs"),
    ("theirs", "checkpoint", "again"),
    ("published", "torch", "direct"),
    ("direct", "published", "last"),
)


def anonymous_bytes() -> int:
    """Bytes that this process holds itself."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])


def one(source: Path, to: str, target: Path) -> None:
    """Convert in this process; print seconds, peak and sizes as JSON."""
    converting = train.convert  # a façade imports when it is asked; imports are not counted
    first, peak, done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    try:
        found = converting(source, target, to)
    finally:
        done.set()
        watcher.join()
    seconds = time.perf_counter() - begin
    print(json.dumps([seconds, peak - first, found.num_bytes, found.largest_bytes]))


def publish(folder: Path, chosen: argparse.Namespace) -> None:
    """Write a published folder with random weights in bf16."""
    sizes = {"hidden_size": chosen.hidden, "num_layers": chosen.layers, "num_heads": 8, "num_kv_heads": 4}
    config = models.LlamaConfig(chosen.vocabulary, ffn_size=3 * chosen.hidden, **sizes)
    models.save_pretrained(models.PlainLlama(config, torch.bfloat16), folder, max_bytes=10**8)


def are_equal(one: Path, other: Path) -> bool:
    """Whether two published folders have the same tensors to the bit."""
    first, second = map(models.PretrainedFolder, (one, other))
    same_names = first.tensors.keys() == second.tensors.keys()
    return same_names and all(torch.equal(first.read(name), second.read(name)) for name in first.tensors)


def main() -> int:
    """Print the table; return 1 if a conversion needs more memory than the bound, or changes a bit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        one(Path(chosen.one[0]), chosen.one[1], Path(chosen.one[2]))
        return 0
    table, is_fine = Table("from", "to", "MB", "largest tensor, MB", "seconds", "peak, MB", "bound, MB"), True
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        publish(folder / "published", chosen)
        for source, to, target in STEPS:
            words = [sys.executable, __file__, "--one", str(folder / source), to, str(folder / target)]
            told = subprocess.run(words, check=True, capture_output=True, text=True).stdout
            seconds, peak, num_bytes, largest = json.loads(told)
            bound = 2 * largest + SLACK
            is_fine &= peak <= bound
            numbers = (num_bytes / 1e6, largest / 1e6, seconds, peak / 1e6, bound / 1e6)
            table.add_row(source, to, *(f"{number:.1f}" for number in numbers))
        same = all(are_equal(folder / "published", folder / name) for name in ("back", "last"))
        checkpoint.Checkpoint(checkpoint.latest(folder / "again")).verify()
    Console().print(table, f"equal to the bit: {same}")
    return 0 if is_fine and same else 1


if __name__ == "__main__":
    sys.exit(main())
