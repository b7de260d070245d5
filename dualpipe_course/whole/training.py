"""Exercises of "Training": four numbers, sequences by coordinates, a plan after a failure, a mean over unequal counts.

Chapter: book/whole/training.  A sampler is asked by two processes in two orders, a plan by its closed forms, and a step
on 1 to 3 ranks is compared with one process that has all tokens.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.comparison import Found, Numbers, Off, compare_on_ranks, in_words
from dualpipe_course.declared import Implement, Predict, Puzzle, Repair
from dualpipe_course.plain import plain
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import call_each, ended, needs_ints, partial_score
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from torch import Tensor

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
GPUS, LAYERS, SEQUENCES, MILLISECONDS, GIGABYTES = 7, 12, 24, 760, 20
_LATE = 1200  # ms, from which on a plan earns nothing


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


class PlanChoice(NamedTuple):
    """A plan of the puzzle, with its closed forms of memory and time."""

    dp: int
    zero: int
    pp: int
    microbatches: int

    def refused(self) -> str:
        """Why the plan cannot run, in words; an empty string if it can."""
        if min(self.dp, self.pp, self.microbatches) < 1 or self.zero not in (0, 1):
            return "dp, pp and microbatches count from 1, and zero is 0 or 1"
        if self.dp * self.pp > GPUS:
            return f"{self.dp} x {self.pp} = {self.dp * self.pp} GPUs, and {GPUS} are healthy"
        if LAYERS % self.pp:
            return f"{LAYERS} layers do not divide into {self.pp} equal stages"
        if SEQUENCES % (self.dp * self.microbatches):
            return f"{SEQUENCES} sequences do not divide among {self.dp} data ranks x {self.microbatches} microbatches"
        return ""

    def gigabytes(self) -> Fraction:
        """Weights and gradients, optimizer state, activations of 1F1B."""
        size = SEQUENCES // (self.dp * self.microbatches)
        state = Fraction(16, self.pp) + Fraction(48, self.pp * (self.dp if self.zero else 1))
        return state + min(self.pp, self.microbatches) * size * Fraction(LAYERS, self.pp) / 4

    def milliseconds(self) -> Fraction:
        """The pipeline, then the sum of gradients over the data ranks."""
        size = SEQUENCES // (self.dp * self.microbatches)
        slot = 10 * size * Fraction(LAYERS, self.pp) + 8
        return (self.microbatches + self.pp - 1) * slot + Fraction(2 * (self.dp - 1), self.dp) * Fraction(160, self.pp)


def _step_in_words(off: Off) -> str:
    return off.slip or in_words(off)


def _with_step(rank: int, world_size: int, fn: Callable[..., Any], counts: Sequence[Sequence[int]]) -> Found:
    import torch

    batches = [_draw_batch(number, own) for number, own in enumerate(counts)]
    table = _table()
    value = fn(table, [(ids.clone(), targets.clone()) for ids, targets in batches[rank]])
    number = value.detach() if isinstance(value, torch.Tensor) else value
    loss = torch.tensor(float(number), dtype=torch.float64) if isinstance(number, (float, torch.Tensor)) else None
    ways = {text: _summed(batches, way) for text, way in _ways(batches).items()}
    right, slips = ways.pop(""), ways
    made = {"loss": {text: each[0] for text, each in slips.items()}, "table.grad": {t: e[1] for t, e in slips.items()}}
    return Found(
        {"loss": Numbers.of(loss), "table.grad": Numbers.of(table.grad)},
        {"loss": Numbers.of(right[0]), "table.grad": Numbers.of(right[1])},
        {name: {text: Numbers.of(each) for text, each in by.items()} for name, by in made.items()},
    )


def _ways(batches: "list[list[tuple[Tensor, Tensor]]]") -> dict[str, list[list[float]]]:
    """By a mistake in words: what the sum of each microbatch of each rank is divided by."""
    counts = [[int((targets >= 0).sum()) for _, targets in batch] for batch in batches]
    total, mean = sum(map(sum, counts)), [sum(own) for own in counts]
    places = sum(targets.numel() for batch in batches for _, targets in batch)
    apart = [[float(count * len(own) * len(counts)) for count in own] for own in counts]
    return {
        "": [[total for _ in own] for own in counts],
        "this is the mean of the ranks' means: a target on a rank with few weighs more": [
            [mean[rank] * len(counts) for _ in own] for rank, own in enumerate(counts)
        ],
        "this is the mean of the microbatches' means: a target of a short one weighs more": apart,
        "this is the mean over all places; those without a target have no loss": [[places for _ in o] for o in counts],
        "this is the sum over all targets; divide by their number": [[1 for _ in own] for own in counts],
    }


def _summed(batches: "list[list[tuple[Tensor, Tensor]]]", divisors: list[list[float]]) -> "tuple[Tensor, Tensor]":
    import torch

    table, total = _table(), torch.zeros((), dtype=torch.float64)
    for batch, own in zip(batches, divisors, strict=True):
        for (ids, targets), divisor in zip(batch, own, strict=True):
            total = total + torch.nn.functional.cross_entropy(table[ids], targets, reduction="sum") / (divisor or 1)
    return total.detach(), torch.autograd.grad(total, table)[0]


def _table() -> "Tensor":
    import torch

    generator = torch.Generator().manual_seed(5)
    return torch.randn(9, 9, dtype=torch.float64, generator=generator).requires_grad_()


def _draw_batch(seed: int, counts: Sequence[int]) -> "list[tuple[Tensor, Tensor]]":
    """Microbatches of 8 places, of which the first `count` have targets."""
    import torch

    generator = torch.Generator().manual_seed(20 + seed)
    batch = []
    for count in counts:
        ids, targets = torch.randint(9, (2, 8), generator=generator)
        targets[count:] = -100
        batch.append((ids, targets))
    return batch


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


def _judge_after_failure(answer: object) -> str:
    plan = PlanChoice(*needs_ints(answer, ("dp", "zero", "pp", "microbatches of a data rank")))
    if refused := plan.refused():
        raise Wrong(refused)
    memory, time = plan.gigabytes(), plan.milliseconds()
    score = partial_score(max(time, Fraction(MILLISECONDS)), _LATE, MILLISECONDS) * (0.5 if memory > GIGABYTES else 1)
    if memory > GIGABYTES:
        raise Wrong(
            f"a legal plan of {float(time):.0f} ms with {float(memory):.1f} GB; {GIGABYTES} are there", score / 2
        )
    if time > MILLISECONDS:
        raise Wrong(
            f"a legal plan with {float(memory):.1f} GB, but {float(time):.0f} ms; {MILLISECONDS} are given", score
        )
    return f"within {MILLISECONDS} ms and {GIGABYTES} GB on the GPUs that are left"


def _judge_mean_step(fn: Callable[..., Any], counts: Any) -> None:
    text = "; ".join(f"rank {rank} {own}" for rank, own in enumerate(counts))
    compare_on_ranks(_with_step, len(counts), fn, counts, case=f"targets per microbatch: {text}", why=_step_in_words)


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

after_failure = Puzzle(
    "training-3",
    "Seven GPUs are left",
    "Choose dp, zero, pp and the microbatches of a data rank: at most 7 GPUs, 20 GB and 760 ms.",
    judge=_judge_after_failure,
    minutes=15,
    points=3,
    hints=(
        "12 layers are to be cut evenly, so 5 or 7 stages are out. 24 sequences are to be cut evenly, too.",
        "ZeRO-1 costs no time in this model of costs. Six GPUs are 1 x 6, 2 x 3, 3 x 2 or 6 x 1.",
        "More microbatches make a smaller bubble and smaller activations; each costs 8 ms on every stage.",
    ),
)

mean_step = Repair(
    "training-4",
    "A mean over unequal counts",
    "Repair `mean_step(table, batch)`: loss and gradient of the mean over all targets of all ranks.",
    cases=(([[3, 3]],), ([[5, 1]],), ([[6], [1]],), ([[5, 1], [2, 6]],), ([[4, 0], [1, 7], [2, 2]],), ([[4], [0, 0]],)),
    judge=_judge_mean_step,
    right="1 to 3 ranks: loss and gradient of one process that has all targets, also beside a microbatch without any",
    minutes=12,
    points=2,
    hints=(
        "Give one microbatch 10 targets and the next 1. How much does each target weigh in the gradient?",
        "All ranks need the number of all targets before the first backward: sum it first.",
        "reduction='sum', divided by that number; gradients and losses are then summed, and not averaged.",
    ),
)
