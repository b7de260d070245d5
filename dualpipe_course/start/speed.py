"""Exercises of "Where the time goes": a utilization with forgotten factors.

Chapter: book/start/speed.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from dualpipe_course.declared import Repair
from dualpipe_course.plain import plain
from dualpipe_course.trial import call_each, ended
from dualpipe_course.wrong import Wrong

PEAK = 989e12


class Run(NamedTuple):
    """What a log says of a step."""

    parameters: int
    table: int
    tied: bool
    layers: int
    hidden: int
    length: int
    causal: bool
    sequences: int
    dp: int
    tp: int
    pp: int
    seconds: float
    recompute: bool


_ONE = Run(1_240_000_000, 262_000_000, False, 16, 2_048, 2_048, False, 8, 1, 1, 1, 0.33, False)  # log A
RUNS = (
    _ONE,
    _ONE._replace(dp=16, seconds=0.35),  # log B
    _ONE._replace(length=32_768, causal=True, sequences=1, seconds=1.0),  # log C
    _ONE._replace(tied=True, seconds=0.4),  # log D
    _ONE._replace(recompute=True, seconds=0.44),
    Run(8_030_000_000, 525_000_000, False, 32, 4_096, 8_192, False, 2, 1, 8, 1, 0.31, False),
    Run(8_030_000_000, 525_000_000, True, 32, 4_096, 16_384, True, 4, 2, 4, 2, 1.9, True),
)
_FORGOTTEN = {
    "dp": "every rank of dp has sequences of its own, and the step has those of all",
    "causal": "a causal mask hides half of the pairs of attention",
    "tied": "a tied table is the head's matrix as well, and the head multiplies",
    "table": "a table that is only looked up multiplies nothing",
    "gpus": "the GPUs are those of all axes",
    "recompute": "the hardware does a second forward, a third of forward and backward; the MFU does not count it",
}


def shares_of(run: Run, forgotten: str = "") -> tuple[float, float]:
    """MFU and share of the hardware; with a factor forgotten, what that makes of them.

    >>> [round(share, 3) for share in shares_of(RUNS[0])]
    [0.335, 0.335]
    """
    parts = {
        "table": 0 if run.tied or forgotten == "table" else run.table,
        "half": 2 if run.causal and forgotten != "causal" else 1,
        "dp": 1 if forgotten == "dp" else run.dp,
        "gpus": run.dp if forgotten == "gpus" else run.dp * run.tp * run.pp,
    }
    if run.tied and forgotten == "tied":
        parts["table"] = run.table
    per_token = 6 * (run.parameters - parts["table"]) + 12 * run.layers * run.length * run.hidden / parts["half"]
    tokens = run.sequences * run.length * parts["dp"]
    mfu = per_token * tokens / (run.seconds * parts["gpus"] * PEAK)
    again = 4 / 3 if run.recompute and forgotten != "recompute" else 1
    return mfu, mfu * again


def _close(found: Iterable[float], expected: Iterable[float]) -> bool:
    return all(abs(a - b) <= 1e-9 * b for a, b in zip(found, expected, strict=True))


def _words(run: Run) -> str:
    said = f"{run.parameters / 1e9:g} billion parameters, {run.sequences} x {run.length:,} tokens"
    grid = f"dp {run.dp}, tp {run.tp}, pp {run.pp}"
    names = ("causal", "tied", "recompute")
    return ", ".join([said, grid, *(name for name in names if getattr(run, name))])


def _judge_utilization(fn: Callable[..., Any]) -> str:
    for run, (fine, value) in zip(RUNS, call_each(fn, [(run,) for run in RUNS]), strict=True):
        where = _words(run)
        if not fine:
            raise Wrong(ended(where, value))
        found = plain(value)
        if not isinstance(found, list) or len(found) != 2 or not all(type(x) in (int, float) for x in found):
            raise Wrong(f"{where}: return two shares, the MFU and that of the hardware")
        expected = shares_of(run)
        if not _close(found, expected):
            slips = [words for name, words in _FORGOTTEN.items() if _close(found, shares_of(run, name))]
            why = slips[0] if slips else "more than one thing is counted wrong"
            raise Wrong(f"{where}: got {found[0]:.2%} and {found[1]:.2%}, "
                        f"expected {expected[0]:.2%} and {expected[1]:.2%}: {why}")  # fmt: skip
    return f"both shares are right in {len(RUNS)} logs"


utilization = Repair(
    "speed-2",
    "Forgotten factors",
    "Repair `utilization(run)`: the MFU and the share of the arithmetic that the hardware does.",
    judge=_judge_utilization,
    minutes=15,
    points=2,
    trail=True,
    hints=(
        "Each log differs from log A in one thing only. Which line of the function should read that thing?",
        "How many tokens has a step of log B? How many pairs has attention in log C?",
        "In log D the head's matrix is the table. What does the function take off, and should it?",
    ),
)
