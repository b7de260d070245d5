"""Exercises of "SwiGLU": what it holds and sends, a packed matrix that is cut as one.

Chapter: book/tp/swiglu.  Outputs are judged against one process.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.declared import Predict, Repair
from dualpipe_course.differences import TOLERANCE
from dualpipe_course.tp import layers
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("numbers held", "numbers kept", "bytes with one sum", "bytes with a sum per branch")
_SLIPS = (
    {
        320: "that is two weights; gate, up and down are three",
        160: "that is one weight of three",
        1920: "that is the whole layer; every weight is cut",
        1600: "the output of down is whole, but its inputs are the rank's: columns of it",
    },
    {
        144: "x is the same on all ranks, and every rank keeps all of it",
        84: "a rank keeps its part of both branches, and all of x",
        156: "that is x and one branch",
        276: "the product of the branches is computed again, not kept",
        576: "the branches are cut: a rank has 10 of their 40 features",
        96: "that is x alone",
    },
    {
        384: "those are the bytes of dx; an all-reduce sends 2 (t - 1) / t of them",
        288: "that is the reduce-scatter alone; an all-gather of the finished sums follows",
        1440: "that sums the middle; it stays cut, and dx has 16 numbers for each token",
        1152: "both branches add their parts locally before anything is sent",
        0: "x was read by all ranks: its gradient is summed",
    },
    {
        576: "then each branch has a sum of its own",
        768: "each of the two sums sends 2 (t - 1) / t of its bytes",
        1728: "down needs no message in the backward",
    },
)
PACKED = ((1, 4), (2, 2), (2, 6), (3, 6), (4, 8))  # ranks, features


def _whole(x: "Tensor", gate: "Tensor", up: "Tensor", down: "Tensor") -> "Tensor":
    from torch.nn.functional import silu

    return (silu(x @ gate.t()) * (x @ up.t())) @ down.t()


class _Found(NamedTuple):
    """What one rank has of a packed matrix whose row i holds i alone: rows, its output's distance, rows joined."""

    rows: list[int]
    error: float
    joined: list[int]


def _cut_and_join(rank: int, world_size: int, cut: Callable[..., Any], join: Callable[..., Any], ffn: int) -> _Found:
    import torch
    from torch.nn.functional import silu

    from dualpipe_lab import comm

    numbered = torch.arange(2.0 * ffn, dtype=torch.float64)[:, None].expand(-1, 3).contiguous()
    own = cut(numbered.clone(), rank, world_size)
    joined = join(comm.all_gather_object(own))
    x, gate_up, down = layers.draw("x", (5, 3)), layers.draw("w", (2 * ffn, 3)), layers.draw("d", (3, ffn))
    part, features = cut(gate_up.clone(), rank, world_size), ffn // world_size
    if len(part) != 2 * features:
        return _Found(_numbers(own), float("inf"), _numbers(joined))
    gate, up = part.chunk(2)
    y = (silu(x @ gate.t()) * (x @ up.t())) @ down[:, rank * features : (rank + 1) * features].t()
    comm.all_reduce(y)
    expected = _whole(x, gate_up[:ffn], gate_up[ffn:], down)
    return _Found(_numbers(own), float((y - expected).norm() / expected.norm()), _numbers(joined))


def _numbers(rows: "Tensor") -> list[int]:
    return [int(number) for number in rows[:, 0].tolist()]


def _why_packed(found: _Found, ffn: int, num_ranks: int) -> str | None:
    features = ffn // num_ranks
    if len(found.rows) != 2 * features:
        return f"its part has {len(found.rows)} rows, needed are {features} of gate and {features} of up"
    if not found.error <= TOLERANCE:
        gate, up = found.rows[0], found.rows[features]
        off = f"the output is {found.error:.0%} off, on every rank alike"
        if up - gate == ffn:
            taken = found.rows[:features]
            return (
                f"{off}. Gate and up match; but the columns of down are those of neighbouring features, not of {taken}"
            )
        return (
            f"{off}. Of the whole matrix, row {gate} is taken for gate here and row {up} for up; do they belong to one "
            "feature?"
        )
    if found.joined != list(range(2 * ffn)):
        return f"the outputs are right, but the parts joined are rows {found.joined} of the matrix that was cut"
    return None


def _judge_packed(cut: Callable[..., Any], join: Callable[..., Any], num_ranks: Any, ffn: Any) -> None:
    case = f"{ffn} features on {num_ranks} rank(s)"
    for rank, found in enumerate(on_ranks(_cut_and_join, num_ranks, cut, join, ffn, case=case)):
        if (problem := _why_packed(found, ffn, num_ranks)) is not None:
            raise Wrong(f"{case}, rank {rank}: {problem}")


numbers = Predict(
    "swiglu-1",
    "Sixteen wide, forty in the middle",
    NAMES,
    lambda t, tokens: (1920 / t, tokens * (16 + 80 / t), 128 * tokens * (t - 1) / t, 256 * tokens * (t - 1) / t),
    "over {t} ranks. It gets {tokens} tokens",
    minutes=6,
    points=1,
    hints=(
        "A quarter of 40 is 10. Each of the three weights has 10 times 16 numbers on a rank.",
        "x has 6 times 16 numbers, whole; each branch has 6 times 10 here.",
        "dx has 6 times 16 numbers of 4 bytes, and an all-reduce sends 2 (t - 1) / t of them from each rank.",
    ),
    slips=_SLIPS,
    t=(4, 2, 8, 5),
    tokens=(6, 4, 5, 8, 10, 12, 15),
    called={"t": "ranks"},
)


packed = Repair(
    "swiglu-3",
    "Two halves in one matrix",
    "Repair `cut` and `join`, which take [gate; up] for one matrix.",
    cases=PACKED,
    judge=_judge_packed,
    right=f"outputs equal one process in {len(PACKED)} cases, and the matrix comes back as it was",
    minutes=12,
    points=2,
    hints=(
        "Number the rows 0 to 7 and cut them for two ranks. Which rows does each rank take for gate, and which for up?",
        "Feature i needs row i of gate and row i of up on the same rank, and column i of down.",
        "gate_up.chunk(2) gives the two halves; each is cut by itself. join must bring the halves together again.",
    ),
)
