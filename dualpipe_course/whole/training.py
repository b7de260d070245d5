"""Exercises of "Training": four numbers, sequences by coordinates.

Chapter: book/whole/training.  A sampler is asked by two processes in two orders.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpipe_course.declared import Implement, Predict
from dualpipe_course.plain import plain
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import call_each, ended
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    pass

NAMES = ("first sequence", "GB of a checkpoint", "seconds lost", "learning rate in 1e-6")
_SLIPS = (
    {
        7: "this is the number of the microbatch among those of all ranks; a microbatch has 12 sequences",
        72: "this is the beginning of the rank; its microbatch 1 comes after its microbatch 0",
        36: "this is the place under 2 microbatches in all; 4 data ranks have 2 each",
        60: "rank 3 comes after ranks 0, 1 and 2",
    },
    {
        32: "this is the weights alone; there are two moments as well",
        64: "these are the moments alone; the weights are saved as well",
        112: "the working copy in bf16 is made from the float32 weights and needs no place in the checkpoint",
        128: "gradients are not saved: a step begins without any",
    },
    {
        1200: "this is the whole interval; a kill comes in the middle of an interval on average",
        100: "these are steps; a step takes 6 seconds",
        6: "this is one step; a whole part of an interval is lost",
    },
    {
        200: "the factor of the first step is 1/8, so that the first update is not lost; count steps from 1",
        800: "the warm-up takes 8 steps",
        100: "this is the learning rate of step 1",
    },
)
LIBRARY = tuple(f"dualpipe_lab.train.sampler:Sampler.{name}" for name in ("rows", "batch"))
NUM_BYTES, LENGTH, GLOBAL_BATCH = 1000, 20, 24
PLANS = ((1, 1), (1, 4), (2, 3), (4, 2), (3, 8), (24, 1), (6, 4))  # data ranks, microbatches of each


def _sampler_cases() -> list[tuple[int, ...]]:
    base = (NUM_BYTES, LENGTH, GLOBAL_BATCH)
    cases = [(*base, seed, step, 0, 1, 1) for seed in (0, 1) for step in (0, 1, 2, 3)]
    cases += [(*base, 1, 3, rank, n, m) for n, m in PLANS[1:] for rank in range(n)]
    cases += [(LENGTH + 3, LENGTH, 2, 0, step, 0, 1, 1) for step in range(40)]  # three windows are possible
    return [*cases, (*base, 0, 0, 0, 5, 1), (*base, 0, 0, 1, 2, 5)]


def _is_legal(case: tuple[int, ...]) -> bool:
    return case[2] % (case[6] * case[7]) == 0


def _named(case: tuple[int, ...]) -> str:
    _, _, _, seed, step, rank, size, number = case
    return f"seed {seed}, step {step}, data rank {rank} of {size} with {number} microbatch{'es' * (number > 1)}"


def _checked_starts(case: tuple[int, ...], fine: bool, value: Any) -> Any:
    """The starts as lists; raise `Wrong` where they cannot be."""
    if not _is_legal(case):
        if fine or "raised ValueError" not in value:
            raise Wrong(f"{_named(case)}: {case[2]} sequences do not divide, and it did not raise ValueError")
        return value
    if not fine:
        raise Wrong(ended(_named(case), value))
    rows, size = plain(value), case[2] // (case[6] * case[7])
    if not isinstance(rows, list) or [len(row) if isinstance(row, list) else -1 for row in rows] != [size] * case[7]:
        raise Wrong(f"{_named(case)}: expected {case[7]} list(s) of {size} starts each, got {str(rows)[:60]}")
    last = case[0] - case[1] - 1
    for start in (start for row in rows for start in row):
        if type(start) is not int or not 0 <= start <= last:
            raise Wrong(f"{_named(case)}: a window starts at {start}; 0 to {last} leave room for {case[1] + 1} bytes")
    return rows


def _check_plans(found: dict[tuple[int, ...], tuple[bool, Any]]) -> None:
    base = (NUM_BYTES, LENGTH, GLOBAL_BATCH)

    def rows(seed: int, step: int, n: int = 1, m: int = 1) -> list[int]:
        ranks = [found[*base, seed, step, rank, n, m][1] for rank in range(n)]
        return [start for rank in ranks for row in rank for start in row]

    full = rows(1, 3)
    for n, m in PLANS[1:]:
        if (mine := rows(1, 3, n, m)) == full:
            continue
        plan = f"{n} data rank(s) with {m} microbatch(es)"
        if n > 1 and mine[: len(mine) // n] * n == mine:
            raise Wrong(f"{plan}: every rank reads the same sequences")
        raise Wrong(
            f"{plan}: the sequences of a step, rank by rank, are others than those of one rank; the plan changed them"
        )
    _check_draws(rows, [start for case, (_, own) in found.items() if case[2] == 2 for start in own[0]])


def _check_draws(rows: Callable[[int, int], list[int]], starts: list[int]) -> None:
    if any(len(set(rows(seed, 0))) < GLOBAL_BATCH // 4 for seed in (0, 1)):
        raise Wrong("the sequences of one step start at the same few places; draw one start for each")
    for step in (0, 1, 2):
        now, after = rows(1, step), rows(1, step + 1)
        if now == after:
            raise Wrong(f"steps {step} and {step + 1} read the same sequences")
        if len(set(now) & set(after)) > GLOBAL_BATCH // 2:
            raise Wrong(f"step {step + 1} reads sequences of step {step} again: step + i is the same number for many i")
        if rows(0, step + 1) == now or rows(0, step) == now:
            raise Wrong(f"seed 1 reads in step {step} what seed 0 reads: keep seed and step apart")
    if set(starts) != {0, 1, 2}:
        raise Wrong(f"a text of length + 3 bytes has windows at 0, 1 and 2; 80 draws started at {sorted(set(starts))}")


def _judge_windows(fn: Callable[..., Any]) -> str:
    cases = _sampler_cases()
    found = dict(zip(cases, call_each(Without(fn, *LIBRARY), cases), strict=True))
    for case, (fine, value) in found.items():
        found[case] = fine, _checked_starts(case, fine, value)
    _check_plans(found)
    again = call_each(Without(fn, *LIBRARY), cases[::-1])
    for case, (_, value) in zip(cases[::-1], again, strict=True):
        if _is_legal(case) and plain(value) != found[case][1]:
            raise Wrong(
                f"{_named(case)}: a second process, asked in another order, got other windows; a resumed run too"
            )
    return f"{len(PLANS)} plans with the same sequences, in two processes; what does not divide is refused"


numbers = Predict(
    "training-1",
    "Four numbers of a training run",
    NAMES,
    lambda batch, billions, step, every, peak: (7 * batch / 8, 12 * billions, step * every / 2, 3 * peak / 8),
    "a global batch of {batch} sequences",
    "has {billions} billion parameters",
    "A step takes {step} seconds, and every {every} steps",
    "over 8 steps to {peak} millionths",
    minutes=8,
    points=1,
    hints=(
        "A microbatch has 96 / (4 · 2) sequences, and rank 3 comes after three ranks with two microbatches each.",
        "The working weights can be made again from the float32 ones, and a step begins without gradients.",
        "A kill comes anywhere between two checkpoints. In the warm-up, step 1 has the factor 1/8.",
    ),
    slips=_SLIPS,
    batch=(96, 48, 64, 80),
    billions=(8, 3, 7, 13),
    step=(6, 4, 5, 8),
    every=(200, 100, 500),
    peak=(800, 400, 1600),
    called={
        "batch": "global batch",
        "billions": "billion parameters",
        "step": "seconds of a step",
        "every": "steps between saves",
        "peak": "peak rate in millionths",
    },
)

windows = Implement(
    "training-2",
    "Sequences by coordinates",
    "Write `windows(num_bytes, length, global_batch, seed, step, data_rank, data_size, num_microbatches)`.",
    judge=_judge_windows,
    minutes=20,
    points=3,
    hints=(
        "First write the start of sequence number i of a step, for i from 0 to global_batch - 1. Then say which i this "
        "rank has.",
        "random.Random(f'{seed}/{step}/{i}').random() is the same number in every process.",
        "A microbatch has b = global_batch / (data ranks · microbatches) sequences; microbatch m of data rank r begins "
        "with number (r M + m) b. A window takes length + 1 bytes.",
    ),
)
