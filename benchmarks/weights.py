"""Conversions of a model between the forms of its weights: sizes, times, and the memory that each needs.

Every conversion runs in a process of its own.  Memory is what the process holds itself (RssAnon; pages of mapped
files do not count) above what it held after its imports, read every 2 ms.  The bound is the largest tensor as it is
read, once more as it is written, and 16 MB for headers and buffers.  The second row's folder equals the first one to
the bit.
The second table is of a V3-style model, whose experts are single in published files and stacked in checkpoints of this
library: the largest tensor is counted with single experts, and a stack alone would exceed the bound.

    python benchmarks/weights.py [--layers 8] [--hidden 1024] [--vocabulary 32000] [--experts 96]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from dualpipe_lab import models, tp, train
from dualpipe_lab.dp import checkpoint

SLACK = 16 * 10**6
STEPS = (
    ("published", "checkpoint", "ours"),
    ("ours", "published", "back"),
    ("back", "checkpoint", "again"),
)


def anonymous_bytes() -> int:
    """Bytes that this process holds itself."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])


def one(source: Path, to: str, target: Path) -> None:
    """Convert in this process; print seconds, peak and sizes as JSON."""
    converting = train.convert  # a façade imports when it is asked, and torch with its first layers without memory
    with torch.device("meta"):
        models.PlainLlama(models.LlamaConfig(), device="meta")
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


def publish_llama(folder: Path, chosen: argparse.Namespace) -> str:
    """Write a published folder with random weights in bf16; return a title."""
    sizes = {"hidden_size": chosen.hidden, "num_layers": chosen.layers, "num_heads": 8, "num_kv_heads": 4}
    config = models.LlamaConfig(chosen.vocabulary, ffn_size=3 * chosen.hidden, **sizes)
    models.save_pretrained(models.PlainLlama(config, torch.bfloat16), folder, max_bytes=10**8)
    return "a Llama"


def publish_v3(folder: Path, chosen: argparse.Namespace) -> str:
    """Write a published folder of a V3-style model with random weights in bf16; return a title."""
    half = chosen.hidden // 2
    sizes = {"hidden_size": half, "ffn_size": 2 * half, "expert_ffn_size": half, "num_layers": 3, "num_heads": 8}
    config = models.V3MoEConfig(
        chosen.vocabulary // 8, **sizes, num_experts=chosen.experts, latent=tp.LatentSizes(64, 32, 16, 16, 16)
    )
    model = models.PlainV3MoE(config, torch.bfloat16)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.normal_()
    models.save_pretrained(model, folder, max_bytes=10**8)
    stack = chosen.experts * half * half * 2
    return f"a V3-style model: {chosen.experts} experts in 2 layers, a stack of them has {stack / 1e6:.1f} MB"


def are_equal(one: Path, other: Path) -> bool:
    """Whether two published folders have the same tensors to the bit."""
    first, second = map(models.PretrainedFolder, (one, other))
    same_names = first.tensors.keys() == second.tensors.keys()
    return same_names and all(torch.equal(first.read(name), second.read(name)) for name in first.tensors)


def measure(publish: Callable[[Path, argparse.Namespace], str], chosen: argparse.Namespace) -> bool:
    """Print the table of one model; return whether all is within the bound, and equal to the bit."""
    table, is_fine = Table("from", "to", "MB", "largest tensor, MB", "seconds", "peak, MB", "bound, MB"), True
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        title = publish(folder / "published", chosen)
        for source, to, target in STEPS:
            words = [sys.executable, __file__, "--one", str(folder / source), to, str(folder / target)]
            told = subprocess.run(words, check=True, capture_output=True, text=True).stdout
            seconds, peak, num_bytes, largest = json.loads(told)
            bound = 2 * largest + SLACK
            is_fine &= peak <= bound
            numbers = (num_bytes / 1e6, largest / 1e6, seconds, peak / 1e6, bound / 1e6)
            table.add_row(source, to, *(f"{number:.1f}" for number in numbers))
        same = are_equal(folder / "published", folder / "back")
        checkpoint.Checkpoint(checkpoint.latest(folder / "again")).verify()
    Console().print(title, table, f"equal to the bit: {same}")
    return is_fine and same


def main() -> int:
    """Print the tables; return 1 if a conversion needs more memory than the bound, or changes a bit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--experts", type=int, default=96)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        one(Path(chosen.one[0]), chosen.one[1], Path(chosen.one[2]))
        return 0
    found = [measure(publish, chosen) for publish in (publish_llama, publish_v3)]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
