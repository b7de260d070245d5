"""What tests of published figures share: how errors are reported, and what stays beside a model in Megatron's runs."""

from dataclasses import replace
from statistics import median

GIB, MIB = 2**30, 2**20


def report(what, errors):
    """Print the number of rows, the median and the worst of some errors, and return both."""
    errors = list(map(abs, errors))
    print(f"{what}: {len(errors)} rows, median error {median(errors):.2%}, worst {max(errors):.2%}")
    return median(errors), max(errors)


def with_workspaces(rules, accelerator, config=""):
    """Return Megatron's rules with the workspaces of an accelerator, given the row's CUBLAS_WORKSPACE_CONFIG.

    cuBLAS has one for the forward's thread and one for the backward's: `:4096:8` is eight of 4096 KiB; torch's default
    32 MiB since H100, and before `:4096:2:16:8`.  Transformer Engine has one, 32 MiB since H100 and before 4 MiB, and
    one more for each of four streams of experts' products.
    """
    is_old = accelerator == "a100"
    engine = (4 if is_old else 32) * MIB
    each = 8 * 4096 * 1024 if config == ":4096:8" else (2 * 4096 + 8 * 16) * 1024 if is_old else 32 * MIB
    return replace(rules, workspace_bytes=2 * each + engine, expert_workspace_bytes=4 * engine)
