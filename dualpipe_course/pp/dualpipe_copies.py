"""Exercises of "DualPipe: two copies": bytes of mirrors, a table in two stages.

Chapter: book/pp/dualpipe-copies.  Both copies of each stage are judged against one process, messages by the ledger.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers
from dualpipe_course.declared import Predict, Repair

if TYPE_CHECKING:
    from torch import Tensor, nn

NAMES = ("microbatches", "sent by rank 5", "sent by rank 2", "moments", "moments of two pipelines", "squares")
_SLIPS: tuple[dict[int, str], ...] = (
    {24: "the other half of the batch passes the copy on rank 1", 4: "each direction has half of the 24"},
    {
        100_000: "that is stage 0 alone; rank 5 holds a copy of stage 0 and stage 5",
        40_000: "that is stage 5 alone; rank 5 is the mirror of rank 0",
        80_000: "rank 5 is the mirror of rank 0, so it holds the large stage too",
        280_000: "each of the two mirrors sends its gradients once",
    },
    {
        40_000: "rank 2 holds stage 3 too, the one of its mirror",
        140_000: "ranks 2 and 3 have no copy of stage 0",
    },
    {
        280_000: "that is without ZeRO-1; each of the two mirrors keeps half",
        70_000: "Adam has two moments for each weight",
        120_000: "the weights are 35,000: stages 0 and 5",
    },
    {
        140_000: "that is for one pipeline; with two, four ranks hold a copy of each stage",
        35_000: "two pipelines with two copies each make four ranks",
    },
    {
        25: "that counts each stage once; every stage is held twice",
        10: "squares are summed: 25 for each copy",
        100: "there are two copies of each stage",
    },
)
SHAPES = ((3, 2), (4,))  # of every stage's parameters
TABLE = (5, 2)
_TABLE = "the gradient of the tied table"
_SUMMED = "rank {rank} sent {found:g} bytes, {most:g} are enough: each gradient once, to the mirror alone"


def _bytes_of_two() -> int:
    return 2 * 8 * sum(a * (rest[0] if rest else 1) for a, *rest in SHAPES)


def _draw(*seed: int, shape: tuple[int, ...]) -> "Tensor":
    """Whole numbers, so that every order of sums has the same bits."""
    import torch

    number = sum(part * 101**place for place, part in enumerate(seed, start=1))
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(number)).double()


def _make_stage(stage: int, table: "Tensor | None" = None) -> "nn.Module":
    import torch
    from torch import nn

    module = nn.Module()
    for index, shape in enumerate(SHAPES):
        module.register_parameter(f"w{index}", nn.Parameter(_draw(stage, index, shape=shape)))
    if isinstance(table, torch.Tensor):
        module.register_parameter("table", table)
    return module


def _whose(stage: int, rank: int) -> str:
    return f"its {'own' if stage == rank else 'other'} stage"


def _sum_copies(rank: int, world_size: int, fn: Callable[..., Any], is_tied: bool) -> Found:
    import torch
    from torch import nn

    last = world_size - 1
    numbers_of = (rank, last - rank)
    table = nn.Parameter(torch.ones(TABLE, dtype=torch.float64)) if is_tied and rank in (0, last) else None
    stages = {stage: _make_stage(stage, table) for stage in numbers_of}
    parameters, sums = dict[str, Any](), dict[str, Any]()
    for stage, module in stages.items():
        for index, (key, w) in enumerate(module.named_parameters()):
            name = _TABLE if key == "table" else f"the gradient of {key} of {_whose(stage, rank)}"
            both = [_draw(stage, index, way + 1, shape=tuple(w.shape)) for way in (0, 1)]
            own = both[int(stage != rank)]
            w.grad = own.clone() if w.grad is None else w.grad + own
            sums[name] = sums.get(name, 0) + both[0] + both[1]
            parameters[name] = w
    fn(rank, world_size, stages)
    values = {name: Numbers.of(w.grad) for name, w in parameters.items()}
    return Found(values, {_TABLE: None} | {name: Numbers.of(both) for name, both in sums.items()})


numbers = Predict(
    "dualpipe_copies-1",
    "Six ranks, one large stage",
    NAMES,
    lambda m, first, others, norm: (
        m // 2,
        4 * (first + others),
        8 * others,
        4 * (first + others),
        2 * (first + others),
        2 * norm**2,
    ),
    "6 ranks with {m} microbatches. Stage 0 has {first:,} weights, every other stage {others:,}.",
    "The norm of the whole gradient is {norm}.",
    minutes=8,
    points=2,
    hints=(
        "Rank r holds stages r and 5 - r. Which ranks hold stage 0?",
        "In the sum each rank sends the gradients of both of its stages to its mirror, 4 bytes for each weight.",
        "Two moments take 8 bytes per weight. How many ranks hold a copy of a stage and can share its moments?",
    ),
    slips=_SLIPS,
    m=(24, 16, 20, 28),
    first=(25_000, 30_000, 35_000, 45_000),
    others=(10_000, 8_000, 12_000),
    norm=(5, 3, 4, 6, 7),
    called={"m": "microbatches", "first": "weights of stage 0:", "others": "of every other stage"},
)


sum_copies = Repair(
    "dualpipe_copies-3",
    "One weight in two stages",
    "Repair `sum_copies(rank, world_size, stages)` for a parameter that both stages of a rank use.",
    cases=((4, False), (2, True), (4, True)),
    run=_sum_copies,
    limits=[Limit("bytes", 2 * (_bytes_of_two() + 2 * TABLE[0] * TABLE[1] * 8), _SUMMED, scope="each")],
    tolerance=0,
    named="{} ranks, a tied table: {}",
    right="with and without a tied table: both copies have the gradient of all microbatches",
    minutes=10,
    points=2,
    hints=(
        "How often does the loop come to the tied table on rank 0, and what is in its .grad after each time?",
        "A second all-reduce of a sum over two ranks doubles it.",
        "Each parameter is summed once, also if it is in two stages. Both mirrors have to leave out the same one.",
    ),
)
