"""Exercises of "One model on every cut": four numbers, all legal sizes, data by ranks.

Chapter: book/whole/cuts.  Sizes are compared with the rules of `Plan`, shares with the grid's coordinates.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.plain import plain
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import call_each, ended
from dualpipe_course.variants import WORDS, Known
from dualpipe_course.wrong import Wrong
from dualpipe_lab.models import LlamaConfig
from dualpipe_lab.plan import Plan
from dualpipe_lab.plan.rules import first_problem
from dualpipe_lab.topology import Topology

LIBRARY = ("dualpipe_lab.plan.rules",)
NAMES = ("ranks", "sequences of a microbatch", "tokens of a microbatch on a rank", "layers of which a rank has a part")
Axes: TypeAlias = list[tuple[str, int]]


def _slips(layers: int, sequences: int, length: int) -> Known:
    each = WORDS[sequences // 16]
    return (
        ((16, "one of the four axes is missing"), (10, "sizes multiply; they do not add up")),
        (
            (sequences / 8, "the sequences of a step are shared out among the data ranks first"),
            (sequences / 2, "these are the sequences of a data rank in a step; it cuts them into 8 microbatches"),
            (sequences / 32, "the ranks of cp share each sequence; they do not share out sequences"),
        ),
        (
            (sequences / 16 * length, "the two ranks of cp have half of the tokens of each sequence"),
            (
                length / 2,
                f"these are the tokens of one sequence; a microbatch has {each}. "
                "Along tp the ranks have the same tokens",
            ),
        ),
        (
            (layers / 4, "this is one stage; under DualPipe a rank has two"),
            (layers, "this is the full model; a rank has two of four stages"),
            (layers / 8, "tp cuts matrices and not layers"),
        ),
    )


def problem_of(sizes: Sequence[int], case: tuple[int, ...]) -> str | None:
    """What is wrong with sizes of pp, dp, cp and tp, or None.

    >>> problem_of((1, 3, 1, 1), (3, 2, 2, 2, 8, 4, 2))
    'dp 3 does not divide 4 sequences'
    """
    num_ranks, num_layers, num_heads, num_kv_heads, length, batch, room = case
    pp, dp, cp, tp = sizes
    if prod(sizes) != num_ranks:
        return f"{pp} x {dp} x {cp} x {tp} are not {num_ranks} ranks"
    config = LlamaConfig(
        hidden_size=2 * num_heads, num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads
    )
    found = first_problem(Plan(pp, dp, cp, tp), config, length)
    if found is not None:
        return found
    if batch % dp:
        return f"dp {dp} does not divide {batch} sequences"
    fullest = -(-num_layers // pp)
    if fullest > room * tp:
        return f"the fullest stage has {fullest} layers, of which a rank holds 1/{tp}, and there is room for {room}"
    return None


def _sizes_fault(case: tuple[int, ...], is_fine: bool, value: Any) -> str | None:
    num_ranks, num_layers, num_heads, num_kv_heads, length, batch, room = case
    words = (
        f"{num_ranks} ranks, {num_layers} layers, {num_heads} heads, {num_kv_heads} KV heads, {length} tokens, "
        f"{batch} sequences, room for {room}"
    )
    if not is_fine:
        return ended(words, value)
    found = plain(list(value) if isinstance(value, (set, frozenset)) else value)
    if not isinstance(found, list) or not all(
        isinstance(row, list) and len(row) == 4 and all(type(size) is int and size > 0 for size in row) for row in found
    ):
        return f"{words}: expected a list of (pp, dp, cp, tp), got {value!r:.80}"
    for row in found:
        if (problem := problem_of(row, case)) is not None:
            return f"{words}: {tuple(row)} is not legal: {problem}"
    if len({tuple(row) for row in found}) != len(found):
        return f"{words}: a plan is listed twice"
    divisors = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    candidates = [(pp, dp, cp, tp) for pp in divisors for dp in divisors for cp in divisors for tp in divisors]
    for row in candidates:
        if list(row) not in found and problem_of(row, case) is None:
            return f"{words}: {row} is missing, and it is legal"
    return None


def _share_fault(case: tuple[int, Axes, int, int, int], is_fine: bool, value: Any) -> str | None:
    rank, axes, batch, num_microbatches, length = case
    words = f"{' x '.join(f'{name} {size}' for name, size in axes)}, rank {rank}"
    if not is_fine:
        return ended(words, value)
    grid, sizes = Topology(axes), dict(axes)
    here = grid.at(rank).coordinates
    dp, cp = sizes.get("dp", 1), sizes.get("cp", 1)
    each, span = batch // dp // num_microbatches, length // cp
    first, start = here.get("dp", 0) * batch // dp, here.get("cp", 0) * span
    sequences = [list(range(first + i * each, first + (i + 1) * each)) for i in range(num_microbatches)]
    positions = list(range(start, start + span))
    if not isinstance(value, list) or len(value) != 2:
        return f"{words}: expected the sequences of each microbatch, and the positions"
    if value[0] != sequences:
        mates = [
            other for other in range(grid.world_size) if grid.at(other).coordinates.get("dp", 0) == here.get("dp", 0)
        ]
        return (
            f"{words}: it reads sequences {value[0]}, expected {sequences}: ranks {', '.join(map(str, mates))} are one "
            f"data rank"
        )
    if value[1] != positions:
        return f"{words}: it reads positions {value[1]}, expected {positions}: it is cp {here.get('cp', 0)} of {cp}"
    return None


def _judge_legal_sizes(fn: Callable[..., Any]) -> str:
    cases = [
        (1, 1, 1, 1, 5, 1, 1),
        (2, 2, 2, 2, 8, 4, 2),
        (4, 4, 4, 2, 16, 8, 4),
        (4, 3, 4, 2, 16, 8, 2),
        (8, 4, 8, 4, 16, 4, 1),
        (6, 5, 6, 3, 24, 6, 2),
        (8, 8, 8, 2, 20, 8, 8),
        (16, 6, 4, 4, 64, 8, 1),
        (16, 2, 2, 1, 6, 1, 1),
    ]
    outcomes = call_each(Without(fn, *LIBRARY), cases)
    for case, (is_fine, value) in zip(cases, outcomes, strict=True):
        if (fault := _sizes_fault(case, is_fine, value)) is not None:
            raise Wrong(fault)
    return f"{len(cases)} models: every legal plan, and no other"


def _judge_share_of(fn: Callable[..., Any]) -> str:
    grids: list[Axes] = [
        [("dp", 2)],
        [("dp", 4), ("tp", 2)],
        [("pp", 2), ("dp", 2)],
        [("pp", 2), ("cp", 2), ("tp", 2)],
        [("tp", 2), ("cp", 3), ("dp", 2)],
        [("pp", 3), ("dp", 2), ("cp", 2), ("tp", 2)],
    ]
    for axes in grids:
        world = prod(size for _, size in axes)
        cases = [(rank, axes, 8, 2, 12) for rank in range(world)]
        for case, (is_fine, value) in zip(cases, call_each(fn, cases), strict=True):
            if (fault := _share_fault(case, is_fine, plain(value))) is not None:
                raise Wrong(fault)
    return f"{len(grids)} grids: ranks of one pipeline read the same sequences"


shares = Predict(
    "cuts-1",
    "What a rank gets",
    NAMES,
    lambda layers, sequences, length: (32, sequences / 16, sequences / 16 * length / 2, layers / 2),
    "A model of {layers} layers",
    "with {sequences} sequences of {length} tokens",
    minutes=6,
    points=1,
    trail=True,
    hints=(
        "Only dp shares out sequences; every data rank cuts its own into microbatches.",
        "Along cp each sequence is cut, along tp and pp nothing of the data is.",
        "Under DualPipe rank i of 4 holds stages i and 3 - i.",
    ),
    slips=_slips,
    layers=(8, 16, 24),
    sequences=(32, 48, 64, 80),
    length=(128, 256, 512),
    called={"length": "tokens of each"},
)

legal_sizes = Implement(
    "cuts-2",
    "Every legal size",
    "Write `legal_sizes(...)`: all (pp, dp, cp, tp) that a model, its data and the memory allow.",
    judge=_judge_legal_sizes,
    minutes=20,
    points=3,
    hints=(
        "Three loops over the divisors of num_ranks; the fourth size follows.",
        "KV heads: either each rank gets several, or several ranks share one. (3 KV heads on 2 ranks are neither.)",
        "The fullest stage has -(-num_layers // pp) layers, which is num_layers / pp rounded up.",
    ),
)


share_of = Repair(
    "cuts-4",
    "The same plan, another loss",
    "Repair `share(rank, axes, batch, num_microbatches, length)`: what a rank reads.",
    judge=_judge_share_of,
    minutes=12,
    points=2,
    trail=True,
    hints=(
        "Write down the coordinates of ranks 0 to 3 of pp 2 x dp 2, and beside each what the function reads.",
        "A coordinate along an axis is rank // stride % size; the stride is the product of the sizes to its right.",
    ),
)
