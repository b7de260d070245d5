"""What one NVIDIA GPU shows, in four parts: `tools/on_gpu.sh [PART ...]` writes a Markdown table of each to $OUT.

  cells      the pages' cells for NCCL with one rank: ten of all parts first, then others while there is time
  compare    `lab.compare_backends` on four collectives in four types
  products   matrix products and attention in bfloat16, beside the utilisation that `lab.plan.estimate` assumes
  profile    the kernels of a training step, and the utilisation that the step reaches
Each part is a process with a time limit.  Exit status: 0, 1 if a part failed, 2 without a GPU.
On the stand-in for NCCL (tests/stand_in) all sizes are tiny and no time says anything.
"""

import contextlib
import inspect
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import torch
from chapter_cells import BOOK, program  # type: ignore[import-not-found]  # of the tests
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

import dualpipe_lab as lab
from dualpipe_lab import comm, models
from dualpipe_lab.launch import accelerator
from dualpipe_lab.plan.estimate import POINT, causal_pairs, estimate, model_flops
from dualpipe_lab.plan.hardware import H100

OUT = Path(os.environ.get("OUT") or "_build/gpu")
IS_REAL = accelerator.OVERRIDE not in os.environ  # else on the stand-in
PAGES = """start/ranks-and-messages dp/zero-1 dp/zero-3 tp/block tp/cross-entropy cp/flash-attention cp/ring-layouts
           ep/gshard pp/pp-basic whole/weights"""
LIMITS = {"cells": 240, "compare": 70, "products": 60, "profile": 80}  # seconds
PEAKS = {f"NVIDIA {name}": H100.flops for name in ("H100 80GB HBM3", "H200", "H800")}  # in bfloat16, by the data sheets
Table = tuple[list[tuple[Any, ...]], str]  # rows, the first of names, and what is said below them


def cells() -> Table:
    """Run the cells for NCCL with one rank; those that GLOO refuses with one rank are skipped."""
    on_both, end = lab.compare_backends, monotonic() + LIMITS["cells"] - 40

    def compare_one(fn: Callable[..., Any], _: int, *inputs: Any, **options: Any) -> None:
        try:
            lab.launch(fn, 1, *inputs, output="collect")
        except (lab.RankError, TypeError, ValueError) as error:
            print("skipped:", str(error).splitlines()[0])
        else:
            on_both(fn, 1, *inputs, **options)

    def run(page: str, code: Any) -> str:
        if monotonic() > end:
            return "skipped: no time left"
        try:
            with contextlib.redirect_stdout(io.StringIO()) as said:
                exec(compile(code, str(BOOK / f"{page}.md"), "exec"), {"__name__": "chapter"})
        except Exception as error:
            return f"FAILED: {type(error).__name__}: {error}".splitlines()[0]
        return said.getvalue().splitlines()[-1]

    vars(lab).update(compare_backends=compare_one, nccl_ready=lambda world_size: True)
    pages = dict.fromkeys([*PAGES.split(), *(str(page.relative_to(BOOK))[:-3] for page in sorted(BOOK.rglob("*.md")))])
    chosen = pages if IS_REAL else ("start/ranks-and-messages", "pp/gpipe")
    codes = [(page, program(BOOK / f"{page}.md")) for page in chosen]
    return [("page", "with one rank"), *((page, run(page, code)) for page, code in codes if code)], ""


def collectives(rank: int, world_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What four collectives leave, of 1,000 numbers."""
    x = torch.arange(1000, device=lab.device()).to(dtype)
    found = [torch.zeros_like(x) for _ in range(3)]
    comm.reduce_scatter_single(found[0], x)
    comm.all_gather_single(found[1], x)
    comm.all_to_all_single(found[2], x)
    comm.all_reduce(x)
    return [*found, x]


def compare() -> Table:
    """Compare GLOO with NCCL on one rank."""
    rows: list[tuple[Any, ...]] = [("collectives of", "with one rank")]
    for dtype in (torch.int64, torch.bfloat16, torch.float32, torch.float64) if IS_REAL else (torch.bfloat16,):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            lab.compare_backends(collectives, 1, dtype, tolerance=0, rounds=5)
        rows.append((dtype, said.getvalue().splitlines()[-1]))
    return rows, ""


def products() -> Table:
    """Time products and attention, and say what part of the peak they reach."""
    rows: list[tuple[Any, ...]] = [("in bfloat16", "size", "ms", "TFLOP/s", "of the peak")]
    make = partial(torch.randn, dtype=torch.bfloat16, device=accelerator.start("nccl", 0))
    for n in (1024, 2048, 4096, 8192, 16384) if IS_REAL else (32,):
        rows.append(("matrix product", f"{n} x {n} x {n}", *speed(partial(torch.mm, make(n, n), make(n, n)), 2 * n**3)))
    heads, width = (32, 128) if IS_REAL else (2, 16)
    for length in (2048, 4096, 8192) if IS_REAL else (32,):
        q, k, v = (make(1, heads, length, width) for _ in range(3))
        attend, flops = partial(scaled_dot_product_attention, q, k, v, is_causal=True), causal_pairs(length)
        found = speed(attend, 4 * heads * width * flops)
        rows.append(("causal attention, forward", f"{heads} heads of {width}, {length} tokens", *found))
    return rows, assumed()


def profile_step() -> Table:
    """Time a training step of a Llama in bfloat16, and list the kernels that take longest."""
    device, config, num_rows, length = accelerator.start("nccl", 0), models.LlamaConfig(), 1, 16
    if IS_REAL:
        config, num_rows, length = models.LlamaConfig(32_000, 2048, 5632, 8, 16, 8), 4, 2048
    model = models.PlainLlama(config, dtype=torch.bfloat16, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(config.vocabulary_size, (num_rows, length + 1), device=device)

    def step() -> None:
        optimizer.zero_grad()
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()

    ms, tflops, share = speed(step, num_rows * model_flops(config, length))
    with profile(activities=[ProfilerActivity.CUDA if IS_REAL else ProfilerActivity.CPU]) as found:
        step()
        accelerator.current().synchronize()
    time = "self_device_time_total" if IS_REAL else "self_cpu_time_total"
    kernels = [(getattr(one, time), one.count, one.key) for one in found.key_averages() if not one.is_user_annotation]
    total = sum(us for us, *_ in kernels)
    longest = sorted(kernels, reverse=True)[:12]
    rows = [(f"`{key[:70]}`", count, f"{us / 1e3:.2f}", f"{us / total:.0%}") for us, count, key in longest]
    size = f"{sum(p.numel() for p in model.parameters())} parameters, {num_rows} x {length} tokens"
    said = f"A step ({size}): {ms} ms, {tflops} TFLOP/s of the model; of the peak: {share}. {assumed()}"
    return [("kernel", "calls", "ms", "of all kernels"), *rows], said


def speed(fn: Callable[[], Any], flops: float) -> tuple[str, str, str]:
    """Milliseconds (the median of 7 rounds of 5 calls, after one), TFLOP/s, and the part of the card's peak."""
    device, times, (rounds, calls) = accelerator.current(), [], (8, 5) if IS_REAL else (2, 1)
    for _ in range(rounds):
        begin, end = device.event(), device.event()
        begin.record()
        for _ in range(calls):
            fn()
        end.record()
        device.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    ms, peak = median(times[1:]), PEAKS.get(card())
    return f"{ms:.3f}", f"{flops / ms / 1e9:.3g}", f"{flops / ms * 1e3 / peak:.0%}" if peak else "peak not known"


def assumed() -> str:
    """What the planner assumes."""
    low, high = inspect.signature(estimate).parameters["utilisation"].default
    return (
        f"`lab.plan.estimate` assumes {low} to {high} of the peak, {H100.flops / 1e12} TFLOP/s; its point is {POINT}."
    )


def card() -> str:
    """The name of the card."""
    return torch.cuda.get_device_name(0) if IS_REAL else "stand-in for NCCL, no GPU"


def write(name: str) -> bool:
    """Run a part in this process and write its table."""
    table, driver = OUT / f"{name}.md", "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
    table.unlink(missing_ok=True)  # that of an earlier run
    (head, *rows), said = {"cells": cells, "compare": compare, "products": products, "profile": profile_step}[name]()
    lines = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    where = f"{card()}, driver {subprocess.getoutput(driver).split()[0] if IS_REAL else '-'}, torch {torch.__version__}"
    table.write_text("\n".join([f"{name}: {where}, {date.today()}", "", *lines, "", said]).rstrip() + "\n")
    return not any("FAILED" in str(row) for row in rows)


def run_part(name: str, limit: float) -> bool:
    """Run a part as a process of its own, and say if it failed."""
    process = subprocess.Popen([sys.executable, __file__, "--here", name], start_new_session=True)
    try:
        reason = f"exit status {process.wait(limit)}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        reason = f"not done after {limit} s"
    is_done = process.wait() == 0
    print(f"{name}: {OUT / name}.md" if is_done else f"{name} FAILED: {reason}", flush=True)
    return is_done


def main(names: list[str]) -> int:
    """Run the parts that are named, or all, one after the other, and return the exit status."""
    if reason := accelerator.nccl_obstacle(1):
        print(f"there is no GPU to measure: {reason}")
        return 2
    OUT.mkdir(parents=True, exist_ok=True)
    if names[:1] == ["--here"]:
        return 0 if write(names[1]) else 1
    are_done = [run_part(name, LIMITS[name]) for name in names or LIMITS]
    return 0 if all(are_done) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
